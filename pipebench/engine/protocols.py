"""What a worker needs: what runs its stages, a transport, collectives, and the losses it hands back.

Transport and collectives the virtual engine has in one process, the distributed engine between processes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from pipebench.engine.accumulation import OnGradient
from pipebench.engine.crossing import Gradients
from pipebench.engine.loss_scale import LossScale
from pipebench.engine.prediction import AS_IT_IS, Displacement
from pipebench.engine.replica import LiveBytes, Values
from pipebench.engine.streams import StreamSlot
from pipebench.model.stage import LossFunction
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op


class UnitLoss(NamedTuple):
    """The loss of one unit.

    Attributes:
        total: summed over its samples, a scalar on the worker's device.
        samples: how many.
        weight: what a mean loss divides it by.
    """

    total: torch.Tensor
    samples: int
    weight: float


class StageRunner(Protocol):
    """Runs a stage: a `Replica`, or a `MigratingReplica` while layers leave or join it.

    Attributes:
        scale: of its gradients; None scales nothing.
        again_bytes: see `Replica`.
    """

    scale: LossScale | None
    again_bytes: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model inputs that the next forward reads."""

    @property
    def is_last(self) -> bool:
        """Whether the model's output is computed here."""

    def forward(
        self,
        unit: int,
        draw: tuple[int, ...],
        inputs: Sequence[torch.Tensor],
        received: Values,
        place: StreamSlot,
        *,
        version: int,
        move: Displacement = AS_IT_IS,
        loss: LossFunction | None = None,
    ) -> tuple[Values, torch.Tensor | None]:
        """Run a unit forward; see `Replica.forward`."""

    def backward(
        self,
        unit: int,
        arrived: Mapping[int, Sequence[torch.Tensor]],
        on_gradient: OnGradient | None = None,
        move: Displacement = AS_IT_IS,
    ) -> Gradients:
        """Run a unit backward; see `Replica.backward`."""

    def stepped(self) -> list[torch.Tensor | None]:
        """Return the round's gradients in the types of what the optimizer steps on, in the stage's order."""

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Apply one update and forget the round's gradients."""

    def skip_update(self, *, keep_from: int) -> None:
        """Forget the round's gradients instead of applying them; the version counts all the same."""

    def swap_out(self, unit: int) -> int:
        """Copy what swapped layers saved of a unit to the host; return the bytes."""

    def swap_in(self, unit: int) -> int:
        """Begin to copy that back; return the bytes."""

    def live_by_kind(self) -> LiveBytes:
        """Return the bytes that it holds on the device, kind by kind."""

    def host_bytes(self) -> int:
        """Return the bytes that it holds on the host."""


class Transport(Protocol):
    """Takes what a worker's stages send to those of other workers, and gives what they receive."""

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Send a unit's values from one stage to another; returns at once.

        Args:
            kind: `activation`, `gradient`, or `evaluation` for the activations of one.
            unit: the unit.
            source: the stage that sends, one of this worker's.
            target: the stage that receives.
            values: activations or gradients by layer.
        """

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return a unit's values that a stage of another worker sent; waits for them."""

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count what this worker's device has copied to its host (kind `swap-out`), or back (`swap-in`)."""


class Collectives(Protocol):
    """What a stage's replicas, or all stages, do together."""

    def on_gradient(self, stage: int) -> OnGradient | None:
        """Return what takes every gradient of a round's last backward as soon as it is whole, if anything does."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give a replica's gradients of a round, as far as they weren't taken one by one."""

    def wait(self, stage: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of what all replicas of the stage gave for a round; waits for them."""

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of a round's gradients of all stages; waits for them."""


Handler = Callable[[Instruction, Transport, Collectives], UnitLoss | None]
Sent = tuple[str, int, int, int, str]  # kind of bytes, sender, receiver, how many, what they are


class WorkerExtension:
    """What an extension adds to a worker, for which it is made.

    Attributes:
        handlers: how instructions are executed: of its own, or in place of those that `Worker.handlers` has.
    """

    handlers: Mapping[Op, Handler]

    def begin(self) -> None:
        """Start a segment of training, with nothing in flight."""


class EngineExtension:
    """What an extension adds to the workers of a process together; made of their collectives when stages are cut."""

    def begin(self, first: int, limit: Callable[[], float]) -> None:
        """Start a segment of training.

        Args:
            first: the minibatch of the run that it begins with.
            limit: tells how many minibatches of it will run, as far as is known.
        """

    def drained(self) -> Iterable[Sent]:
        """Exchange what a drain exchanges; yield what that lets set out where the links' clock is virtual."""
        return ()

    def facts(self) -> list[Any]:
        """Return what it has counted here, in a form that JSON holds."""
        return []

    def restore(self, facts: list[Any]) -> None:
        """Go on from what `facts` returned when a checkpoint was taken.

        Raises:
            CheckpointError: they aren't what it returns.
        """

    def close(self) -> None:
        """End: nothing else comes, in any process."""
