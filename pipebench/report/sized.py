"""Runs of a report whose minibatch is to be the largest that fits: looks for it, before any of them is looked up."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipebench.errors import PlanError
from pipebench.recipe.load import load_file
from pipebench.report.recipes import Asked
from pipebench.train.largest_minibatch import largest_minibatch

_KEY = "train.minibatch_size"


def sized(asked: Sequence[Asked], tell: Callable[[str], None]) -> list[Asked]:
    """Return the runs with the size that was found of each that asks for the largest.

    Where nothing fits the size is 1, and what that comes to says why.

    Args:
        asked: all runs.
        tell: is told in a sentence of every size that was found.

    Raises:
        UserError: a recipe turns out to be wrong, whatever the size.
    """
    found: dict[tuple[str, ...], int] = {}
    for each in asked:
        if each.largest and each.words not in found:
            try:
                found[each.words] = largest_minibatch(each.loaded).minibatch_size
            except PlanError as error:
                found[each.words] = 1
                tell(f"{each.row}, {each.run}: {error}")
            else:
                tell(f"{each.row}, {each.run}: {found[each.words]:,} samples are the largest minibatch that fits")
    return [_with_size(each, found[each.words]) if each.largest else each for each in asked]


def _with_size(asked: Asked, minibatch_size: int) -> Asked:
    words = (*asked.words, f"{_KEY}={minibatch_size}")
    return replace(asked, words=words, loaded=load_file(asked.loaded.path, words[1:]), largest=False)
