"""Checks of options' ranges, with one wording of errors: whose option, the value given, the values allowed."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

SPLITS = ("train", "eval")  # of every data set


def at_least(smallest: float, of: str, why: str = "", /, **options: float) -> None:
    """Check that options are at least `smallest`.

    Args:
        smallest: the least value allowed.
        of: the model or data set that has the options.
        why: what needs so many, for the message.
        options: values by name.

    Raises:
        ValueError: names the first option that is less.
    """
    _check(of, options, lambda value: value >= smallest, f"is {smallest} or more{why and f' ({why})'}")


def more_than(bound: float, of: str, why: str = "", /, **options: float) -> None:
    """Check that options are more than `bound`; arguments and errors as for `at_least`."""
    _check(of, options, lambda value: value > bound, f"is more than {bound}{why and f' ({why})'}")


def below_one(of: str, /, **options: float) -> None:
    """Check that probabilities are at least 0 and less than 1; arguments and errors as for `at_least`."""
    _check(of, options, lambda value: 0 <= value < 1, "is 0 to below 1")


def one_of(allowed: Collection[str], of: str, /, **options: str) -> None:
    """Check that options are among the `allowed` words; arguments and errors as for `at_least`."""
    _check(of, options, allowed.__contains__, f"are {', '.join(allowed)}")


def check_split(of: str, split: str) -> None:
    """Check that a split is one of `SPLITS`; errors as for `at_least`."""
    one_of(SPLITS, of, split=split)


def _check(of: str, options: Mapping[str, Any], is_allowed: Callable[[Any], bool], allowed: str) -> None:
    for name, value in options.items():
        if not is_allowed(value):
            raise ValueError(f"{of}: {name} is {value!r}, allowed {allowed}")


def one_size(of: str, *, because: str, source_vocabulary: int, target_vocabulary: int) -> None:
    """Check that a model's vocabularies have equal sizes.

    Args:
        of: the model.
        because: the option, which is true, that makes them share an embedding.
        source_vocabulary: number of token ids.
        target_vocabulary: number of token ids.

    Raises:
        ValueError: the sizes differ.
    """
    if source_vocabulary != target_vocabulary:
        raise ValueError(
            f"{of}: {because} is true, allowed is false for vocabularies of unequal sizes, here "
            f"{source_vocabulary} and {target_vocabulary}"
        )
