"""The identity of a checkpoint's run, and what its weights depend on besides recipe and plan.

Files are copied between folders, data sets grow, models are edited. A run that resumes must have the same seed, data
and minibatches. Changed code is reported, and so are other samples under the same names and numbers.
"""

import re
from dataclasses import dataclass, fields, replace

from pipebench.checkpoint.state import CheckpointError
from pipebench.formats import listed

_REPORTED = ("code", "samples")  # fields that may differ
_MOST_NAMED = 5  # modules in a sentence
# A dataset's input types in mixed precision. They aren't compared: a run may resume in another precision.
_ROUNDED = re.compile(r"\b(bfloat16|float16)\b", re.ASCII)


@dataclass(frozen=True)
class RunIdentity:
    """What a run's weights depend on."""

    run_id: str  # its folder's name
    seed: int
    dataset: str  # the data set's name, options, fields and numbers of samples
    minibatch_size: int  # in samples
    code: dict[str, str]  # module to the SHA-256 of the user's code; and pipebench's own version
    samples: str  # digest of the first samples


def check_same_run(found: RunIdentity | None, expected: RunIdentity | None) -> None:
    """Refuse a checkpoint of another run or of other data.

    Args:
        found: the run that wrote it; None without a folder, which passes.
        expected: the run that resumes; None without a folder, which passes.

    Raises:
        CheckpointError: names all that differs, what was found and what is expected.
    """
    if found is None or expected is None:
        return
    found, expected = (replace(each, dataset=_ROUNDED.sub("float32", each.dataset)) for each in (found, expected))
    names = [each.name for each in fields(RunIdentity) if each.name not in _REPORTED]
    pairs = [(name, getattr(found, name), getattr(expected, name)) for name in names]
    differing = [f"{name}: found {mine}, expected is {other}" for name, mine, other in pairs if mine != other]
    if differing:
        raise CheckpointError(f"is of another run: {'; '.join(differing)}")


def changes(found: RunIdentity | None, now: RunIdentity | None, step: int) -> list[str]:
    """Return sentences on the code and the samples that have changed since the checkpoint of `step` was written."""
    if found is None or now is None:
        return []
    sentences, since = [], f"since the checkpoint of step {step} was written"
    if names := sorted(name for name in {*found.code, *now.code} if found.code.get(name) != now.code.get(name)):
        sentences.append(f"code has changed {since}: {listed(names, _MOST_NAMED)}")
    if found.samples != now.samples:
        why = "files, or what reads them, or a data set that draws without a seed"
        sentences.append(f"the first samples have changed {since}, so the rest of the run has other data: {why}")
    return sentences
