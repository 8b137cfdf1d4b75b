"""A worker's interfaces: stage runners, transport, collectives, and the losses it returns.

The virtual engine implements transport and collectives in one process, the distributed engine between processes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from pipebench.engine.accumulation import OnGradient
from pipebench.engine.gradients import Gradients
from pipebench.engine.loss_scale import LossScale
from pipebench.engine.prediction import AS_IT_IS, Displacement
from pipebench.engine.replica import LiveBytes, UnitInput, Values
from pipebench.engine.setup import Setup
from pipebench.model.sampling import Size
from pipebench.model.slice_modules import Divided
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.simulate.costs import Costs
from pipebench.simulate.simulation import RunPart


class SegmentCosts(NamedTuple):
    """What instructions cost in a segment on the virtual clock."""

    costs: Costs
    size_of: Callable[[int], Size]  # a unit's size, on which costs depend
    recomputing_s: Callable[[int, int], float] | None  # seconds that a backward recomputes, by its stage and unit


class UnitLoss(NamedTuple):
    """The loss of one unit."""

    total: torch.Tensor  # sum over the samples: [], on the worker's device
    samples: int
    weight: float  # of the samples in a mean loss; 0 if nothing in them is a target

    @property
    def mean(self) -> float:
        """The mean loss, read from the device; NaN without targets."""
        return float(self.total) / self.weight if self.weight else math.nan


class StageRunner(Protocol):
    """Runs a stage for a worker: a `Replica`, or a `MigratingReplica` while layers leave or join the stage."""

    scale: LossScale | None  # None: gradients aren't scaled
    recomputed_bytes: int  # see `Replica`
    divided: Divided | None  # which gradients are slices of whole ones, in the stage's order; None: none is

    @property
    def tied_positions(self) -> frozenset[int]:
        """See `Replica`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model inputs of the next forward."""

    @property
    def is_last(self) -> bool:
        """Whether it computes the model's output."""

    def forward(self, given: UnitInput) -> tuple[Values, torch.Tensor | None]:
        """Run a unit forward; see `Replica.forward`."""

    def backward(
        self, unit: int, arrived: Gradients, on_gradient: OnGradient | None = None, move: Displacement = AS_IT_IS
    ) -> Gradients:
        """Run a unit backward; see `Replica.backward`."""

    def stepped(self) -> list[torch.Tensor | None]:
        """Return the round's gradients in the types the optimizer steps on, in the stage's order."""

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Apply one update and drop the round's gradients."""

    def skip_update(self, *, keep_from: int) -> None:
        """Drop the round's gradients instead of applying them; the version is counted all the same."""

    def swap_out(self, unit: int) -> int:
        """Copy a unit's saved activations of swapped layers to the host; return the bytes."""

    def swap_in(self, unit: int) -> int:
        """Begin to copy a unit's activations back from the host; return the bytes."""

    def live_by_kind(self) -> LiveBytes:
        """Return its bytes on the device, by kind."""

    def host_bytes(self) -> int:
        """Return its bytes on the host."""


class Transport(Protocol):
    """Sends and receives values between a worker's stages and those of other workers."""

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Send a unit's values from a stage of this worker to one of another worker; returns at once.

        Args:
            kind: `activation`, `gradient` or, for an evaluation's activations, `evaluation`.
            unit: its number.
            source: the sending stage.
            target: the receiving stage.
            values: by layer.
        """

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return what another worker has sent with the same arguments; waits for it."""

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count bytes copied from the device to its host (kind `swap-out`) or back (`swap-in`)."""


class Collectives(Protocol):
    """Collectives of a stage's replicas, of the copies of a tie's weights, or of all stages."""

    @property
    def extensions(self) -> Mapping[str, "EngineExtension"]:
        """The enabled extensions' parts in this process."""

    def on_gradient(self, stage: int) -> OnGradient | None:
        """Return a function to call with each gradient of a round's last backward when it is complete, or None."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Contribute a replica's gradients of a round, except those that `on_gradient` has taken."""

    def wait(self, stage: int, replica: int, round_index: int) -> list[torch.Tensor | None]:
        """Return a round's gradients summed over the stage's replicas, or the replica's pieces of them; waits."""

    def gather(self, stage: int, kind: str) -> None:
        """Start to gather the newest weights of a stage from its replicas' shards; bytes are counted as `kind`."""

    def wait_gathered(self, stage: int) -> None:
        """Wait for the weights that `gather` has started to gather."""

    def tied(self, group: int, round_index: int) -> list[torch.Tensor | None]:
        """Return a round's gradients of tied weights, summed over all copies of these; waits."""

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of all stages' gradients of a round: [] float64; waits."""


Handler = Callable[[Instruction, Transport, Collectives], UnitLoss | None]
Sent = tuple[str, int, int, int, str]  # kind of bytes, sending worker, receiving worker, bytes, label


class WorkerExtension:
    """An extension's part in one worker."""

    handlers: Mapping[Op, Handler]  # added to `Worker.handlers`; they replace those of the same operations

    def begin(self, segment: Any) -> None:
        """Start a segment of training, with nothing in flight; `segment` is the extension's part in it, if any."""

    def end(self) -> None:
        """End a segment of training."""

    def passed(self, stage: int) -> None:
        """Called after a backward of a stage, before its round may end."""

    def took(self, instruction: Instruction, seconds: float) -> None:
        """Called with the duration of every instruction."""

    def held(self, num_bytes: int) -> None:
        """Called with the bytes on the worker's device at every measurement; see `WorkerPeaks`."""


class SegmentExtension:
    """An extension's part in one segment of training, on all workers."""

    def costs(self, costs: SegmentCosts) -> SegmentCosts:
        """Return what instructions cost on the virtual clock, given what they cost without the extension."""
        return costs

    def foreseen(self) -> "SegmentExtension":
        """Return a copy for lists of instructions that are read ahead and not executed."""
        return self


class EngineExtension:
    """An extension's part in a process, for all its workers; made with their collectives when stages are cut."""

    def segment(self) -> SegmentExtension | None:
        """Return the extension's part in the segment that begins next, if any."""
        return None

    def begin(self, part: RunPart) -> None:
        """Start a segment."""

    def ended(self, setup: Setup) -> Setup:
        """End a segment; return the setup to continue with."""
        return setup

    def drained(self) -> Iterable[Sent]:
        """Run a drain's exchange; on a virtual clock, yield what it sends."""
        return ()

    def facts(self) -> list[Any]:
        """Return its counters as JSON values."""
        return []

    def restore(self, facts: list[Any]) -> None:
        """Restore the counters from what `facts` returned; raises a CheckpointError if they have another form."""

    def close(self) -> None:
        """End the run; all processes call it."""
