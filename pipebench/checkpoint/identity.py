"""The identity of a checkpoint's run, and what its weights depend on besides the recipe and plan.

Files are copied between folders, data sets grow, models are edited. A run that resumes must have the same seed, data
and minibatches; changed code is reported.
"""

import re
from dataclasses import dataclass, fields, replace

from pipebench.checkpoint.state import CheckpointError
from pipebench.formats import listed

_CODE = "code"
_MOST_NAMED = 5  # modules in a sentence
_ROUNDED = re.compile(r"\b(bfloat16|float16)\b", re.ASCII)  # inputs, in a run of 16 bits; a run of any goes on from it


@dataclass(frozen=True)
class RunIdentity:
    """What a run's weights depend on."""

    run_id: str  # its folder's name
    seed: int
    dataset: str  # the data set's name, options, fields and numbers of samples
    minibatch_size: int  # in samples
    code: dict[str, str]  # module to the SHA-256 of the user's code; and pipebench's own version


def check_same_run(found: RunIdentity | None, expected: RunIdentity | None) -> None:
    """Refuse a checkpoint of another run or other data; `expected` resumes. None, of old or folderless runs, passes.

    Raises:
        CheckpointError: names all that differs, what was found and what is expected.
    """
    if found is None or expected is None:
        return
    found, expected = (replace(each, dataset=_ROUNDED.sub("float32", each.dataset)) for each in (found, expected))
    names = [each.name for each in fields(RunIdentity) if each.name != _CODE]
    pairs = [(name, getattr(found, name), getattr(expected, name)) for name in names]
    differing = [f"{name}: found {mine}, expected is {other}" for name, mine, other in pairs if mine != other]
    if differing:
        raise CheckpointError(f"is of another run: {'; '.join(differing)}")


def changed_code(found: RunIdentity | None, now: RunIdentity | None) -> str | None:
    """Return the modules that changed since a checkpoint was written, as the end of a sentence; None without any."""
    if found is None or now is None or found.code == now.code:
        return None
    names = sorted(name for name in {*found.code, *now.code} if found.code.get(name) != now.code.get(name))
    return listed(names, _MOST_NAMED)
