"""Whose a checkpoint is: the run that wrote it, and what its weights depend on besides the recipe's plan.

A folder of checkpoints is only a folder: files are copied into it, data sets grow, models are edited. What the weights
depend on has to be the same in the run that goes on; code may have changed, and is told.
"""

from dataclasses import dataclass, fields

from pipebench.checkpoint.state import CheckpointError

_CODE = "code"
_MOST_NAMED = 5  # modules in a sentence


@dataclass(frozen=True)
class RunIdentity:
    """What a run is, as far as its weights depend on it.

    Attributes:
        run_id: its folder's name.
        seed: of the run.
        dataset: the data set: its name, options, fields and numbers of samples.
        minibatch_size: samples that travel together.
        code: by module the SHA-256 of the user's own code; and what says which code pipebench's own is.
    """

    run_id: str
    seed: int
    dataset: str
    minibatch_size: int
    code: dict[str, str]


def check_same_run(found: RunIdentity | None, expected: RunIdentity | None) -> None:
    """Refuse a checkpoint of another run, or of one with other data.

    Args:
        found: what the checkpoint says; None in those of 0.1.0 before they did, which are taken.
        expected: the run that would go on; None where it has no folder.

    Raises:
        CheckpointError: names all that differs, what was found and what is expected.
    """
    if found is None or expected is None:
        return
    names = [each.name for each in fields(RunIdentity) if each.name != _CODE]
    pairs = [(name, getattr(found, name), getattr(expected, name)) for name in names]
    differing = [f"{name}: found {mine}, expected is {other}" for name, mine, other in pairs if mine != other]
    if differing:
        raise CheckpointError(f"is of another run: {'; '.join(differing)}")


def changed_code(found: RunIdentity | None, now: RunIdentity | None) -> str | None:
    """Return which code has changed since a checkpoint was written, as the end of a sentence; None if none has.

    Args:
        found: what the checkpoint says.
        now: the run that goes on.
    """
    if found is None or now is None or found.code == now.code:
        return None
    names = sorted(name for name in {*found.code, *now.code} if found.code.get(name) != now.code.get(name))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"
