"""A worker's interfaces: stage runners, transport, collectives, and the losses it returns.

The virtual engine implements transport and collectives in one process, the distributed engine between processes.
"""

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
    size_of: Callable[[int], Size]  # of a unit, on which costs depend
    recomputing_s: Callable[[int, int], float] | None  # of repeated forwards, by the stage and unit of a backward


class UnitLoss(NamedTuple):
    """The loss of one unit."""

    total: torch.Tensor  # sum over samples, a scalar on the worker's device
    samples: int
    weight: float  # divisor of a mean loss


class StageRunner(Protocol):
    """Runs a stage: a `Replica`, or a `MigratingReplica` while layers leave or join it."""

    scale: LossScale | None  # of its gradients; None: no scaling
    again_bytes: int  # see `Replica`
    divided: Divided | None  # which gradients are parts of whole ones, in the stage's order; None: none is

    @property
    def apart(self) -> frozenset[int]:
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
        """Drop the round's gradients instead of applying them; counts as a version all the same."""

    def swap_out(self, unit: int) -> int:
        """Copy a unit's saved activations of swapped layers to the host; return the bytes."""

    def swap_in(self, unit: int) -> int:
        """Begin to copy them back; return the bytes."""

    def live_by_kind(self) -> LiveBytes:
        """Return its bytes on the device, by kind."""

    def host_bytes(self) -> int:
        """Return its bytes on the host."""


class Transport(Protocol):
    """Sends and receives values between a worker's stages and those of other workers."""

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Send a unit's values from one stage of this worker to another's; returns at once.

        `kind` is `activation`, `gradient`, or `evaluation` for an evaluation's activations; `values` are by layer.
        """

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return a unit's values from a stage of another worker; waits for them."""

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
        """Contribute a replica's gradients of a round, except those taken by `on_gradient`."""

    def wait(self, stage: int, replica: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of a round's gradients over the stage's replicas, or the replica's pieces; waits for them."""

    def gather(self, stage: int, kind: str) -> None:
        """Start to gather the newest weights of a stage from its replicas; bytes are counted as `kind`."""

    def wait_gathered(self, stage: int) -> None:
        """Wait for the weights of a stage that are on their way."""

    def tied(self, group: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of a round's gradients over all copies of a tie's weights; waits for them."""

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of a round's gradients of all stages; waits for them."""


Handler = Callable[[Instruction, Transport, Collectives], UnitLoss | None]
Sent = tuple[str, int, int, int, str]  # kind of bytes, sender, receiver, bytes, label


class WorkerExtension:
    """An extension's part in one worker."""

    handlers: Mapping[Op, Handler]  # added to `Worker.handlers`, or in place of some

    def begin(self, segment: Any) -> None:
        """Start a segment of training, with nothing in flight; `segment` is the extension's part in it, if any."""

    def end(self) -> None:
        """End a segment of training."""

    def passed(self, stage: int) -> None:
        """Take note of a backward of a stage, before its round may end."""

    def took(self, instruction: Instruction, seconds: float) -> None:
        """Take note of an instruction's time."""

    def held(self, num_bytes: int) -> None:
        """Take note of the bytes that the worker holds."""


class SegmentExtension:
    """An extension's part in one segment of training, on all workers."""

    def costs(self, costs: SegmentCosts) -> SegmentCosts:
        """Return what instructions cost on the virtual clock."""
        return costs

    def foreseen(self) -> "SegmentExtension":
        """Return a copy for lists that are only looked ahead in."""
        return self


class EngineExtension:
    """An extension's part in a process's workers together; made with their collectives when stages are cut."""

    def segment(self) -> SegmentExtension | None:
        """Return the extension's part in the segment that begins next, if any."""
        return None

    def begin(self, part: RunPart) -> None:
        """Start a segment."""

    def ended(self, setup: Setup) -> Setup:
        """End a segment; return the setup to go on with."""
        return setup

    def drained(self) -> Iterable[Sent]:
        """Run a drain's exchange; yield what it sends if the links' clock is virtual."""
        return ()

    def facts(self) -> list[Any]:
        """Return its counters as JSON values."""
        return []

    def restore(self, facts: list[Any]) -> None:
        """Restore the result of `facts` from a checkpoint; raises a CheckpointError if it has another form."""

    def close(self) -> None:
        """End the run; all processes call it."""
