"""One entry of a run's record of its repartitions, as checkpoints and results keep it."""

from dataclasses import dataclass

from pipebench.typed_json import Amount, Count, Ordinal


@dataclass(frozen=True)
class RepartitionRecord:
    """New cuts, from a minibatch of a run on."""

    minibatch: Ordinal  # first of the run, from 0, that runs forward under them
    cuts: tuple[str, ...]  # first layer of every stage but the first
    memory: dict[str, str] | None = None  # by name, policies of layers that don't keep; None: unchanged
    was: tuple[str, ...] = ()  # the cuts before
    why: str = "decided beforehand"  # in words
    live: bool = False  # whether training went on; else the pipeline was drained first
    samples: Count = 0  # of the run before that minibatch
    clock_s: Amount = 0.0  # the run's clock when the new cuts were in place
    stall_s: Amount = 0.0  # seconds without computation since the drain; 0 if training went on
