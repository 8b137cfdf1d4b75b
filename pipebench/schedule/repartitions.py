"""One entry of a run's record of its repartitions, as stored in checkpoints and results."""

from dataclasses import dataclass

from pipebench.typed_json import Amount, Count, Ordinal


@dataclass(frozen=True)
class RepartitionRecord:
    """Cuts that replace those before from a minibatch of a run on."""

    minibatch: Ordinal  # index, in the run, of the first minibatch that runs forward under the new cuts
    cuts: tuple[str, ...]  # first layer of every stage but the first
    memory: dict[str, str] | None = None  # layer name to memory policy, where it isn't `keep`; None: all unchanged
    was: tuple[str, ...] = ()  # the cuts before
    why: str = "decided beforehand"  # in words
    live: bool = False  # whether layers moved during training; else the pipeline was drained first
    samples: Count = 0  # of the run before that minibatch
    clock_s: Amount = 0.0  # the run's clock when the new cuts were in place
    stall_s: Amount = 0.0  # seconds without computation from the drain until then; 0 if training went on
