"""A segment of training in which layers may move: the setup under each of its cuts, and the costs of instructions.

On the virtual clock a pass takes the time that it has under its unit's cuts, and a transfer of layers the time of its
bytes. Cost tables are indexed by a unit's size. Here this key also has the cuts of the unit's forward and backward
(`PhasedSize`), so that the simulator needs no code for moves. Tables are filled on demand.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

from pipebench.engine.protocols import SegmentCosts, SegmentExtension
from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.extensions.moves.repartition_plan import (
    BlockTransfer,
    CutLayout,
    Policies,
    Repartition,
    RepartitionPlan,
    layout_of,
)
from pipebench.model.graph import tensors_of
from pipebench.model.plan import make_plan, recut
from pipebench.model.sampling import Size, UnitShape
from pipebench.model.stage import Stage, cut_stage
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.simulate.costs import Costs, StageCosts
from pipebench.simulate.memory import swapped_bytes

_Values = dict[int, tuple[int, ...]]  # by the other stage: the layers whose values are exchanged with it


class MovingSegment(RepartitionPlan, SegmentExtension):
    """A segment of training in which layers may move; `setup` has the cuts at the drain before it."""

    moving: "PhaseCosts"  # set by `costs`, if the segment is simulated

    def __init__(self, setup: Setup) -> None:
        layout = layout_of(setup.plan)
        super().__init__(setup.pipeline, layout)
        self.setup = setup
        self._known = {layout: setup}
        self._crossings: dict[tuple[int, CutLayout], tuple[_Values, _Values]] = {}

    def announce(self, move: Repartition) -> None:
        """Add a move.

        Raises:
            PlanError: it is impossible or too early, or the cuts separate layers that share parameters.
        """
        if self.setup.plan.relay:
            raise PlanError(
                "layers move while training goes on only where values go straight to who reads them; set relay: false"
            )
        for problem in self.problems(move):
            raise PlanError(problem)
        before = self.last_layout
        after = move.after(before)
        # Boundaries switch one by one: cut the model under all layouts in between, so that errors come now.
        for switched in range(1, len(before.starts) + 1):
            for memory in (before.memory, after.memory):
                self.at(CutLayout((*after.starts[:switched], *before.starts[switched:]), memory))
        super().announce(move)

    def costs(self, costs: SegmentCosts) -> SegmentCosts:
        """Return the costs of instructions under the cuts of their units."""
        pipeline = self.setup.pipeline
        moving = self.moving = PhaseCosts(self, costs.size_of, lambda unit: pipeline.minibatch(unit)[0])
        return SegmentCosts(moving.costs, moving.size_of, moving.recomputing_s)

    def foreseen(self) -> "MovingSegment":
        """Return a new segment with the moves announced so far."""
        made = MovingSegment(self.setup)
        for move in self.announced:
            made.announce(move)
        return made

    @property
    def last(self) -> Setup:
        """The setup after the last move."""
        return self.at(self.last_layout)

    def at(self, layout: CutLayout) -> Setup:
        """Return the setup under cuts and policies."""
        if layout not in self._known:
            self._known[layout] = self.setup.under(recut(self.setup.graph, self.setup.plan, *layout))
        return self._known[layout]

    def sends(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose values a stage sends in a minibatch's forward, by receiving stage, ascending."""
        return self._crossing(stage, self.forward_layout(minibatch))[0]

    def returns(self, stage: int, minibatch: int) -> _Values:
        """Return the layers whose gradients a stage sends in a minibatch's backward, by receiving stage."""
        return self._crossing(stage, self.backward_layout(minibatch))[1]

    def policies(self, minibatch: int) -> Policies:
        """Return the memory policies of all layers for a minibatch."""
        return self.forward_layout(minibatch).memory

    def cut(self, start: int, stop: int, memory: Policies) -> Stage:
        """Return layers [start, stop) as a stage of their own; `memory` has the policies of all layers of the model."""
        graph = self.setup.graph
        bounds = [each for each in (start, stop) if 0 < each < len(graph.layers)]
        return cut_stage(graph, make_plan(graph, bounds, [1] * (len(bounds) + 1), memory=memory), int(start > 0))

    def _crossing(self, stage: int, layout: CutLayout) -> tuple[_Values, _Values]:
        """Return the layers whose values leave a stage, and those whose values reach it, by the other stage."""
        if (stage, layout) not in self._crossings:
            crossings = self.at(layout).plan.crossings.items()
            leave = {b: values for (a, b), values in crossings if a == stage}
            self._crossings[stage, layout] = leave, {a: values for (a, b), values in crossings if b == stage}
        return self._crossings[stage, layout]


N = TypeVar("N", int, float)
SIZES_CACHED = 1024  # more than there are units in flight


class PhasedSize(NamedTuple):
    """A unit's size and its cuts: the key of cost tables while layers move."""

    size: Size
    forward: CutLayout  # cuts and memory policies of its forward
    backward: CutLayout  # of its backward


class _CostTable(dict[Any, N], Generic[N]):
    """Costs by `PhasedSize`, computed on demand."""

    def __init__(self, find: Callable[[PhasedSize], N]) -> None:
        self._find: Callable[[PhasedSize], N] = find

    def __missing__(self, key: PhasedSize) -> N:
        found: N = self._find(key)
        self[key] = found
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a size's cost; every size has one."""
        return self[key]


class PhaseCosts:
    """The costs of instructions in a segment in which layers may move.

    Args:
        phases: the segment.
        size_of: returns a unit's size.
        minibatch_of: returns a unit's minibatch.
    """

    def __init__(
        self, phases: MovingSegment, size_of: Callable[[int], Size], minibatch_of: Callable[[int], int]
    ) -> None:
        self._phases = phases
        self._plain_size = size_of
        self._minibatch_of = minibatch_of
        self.size_of = lru_cache(maxsize=SIZES_CACHED)(self._size_of)
        self._held_bytes = cache(partial(_held_bytes, phases.setup))

    @cached_property
    def costs(self) -> Costs:
        """Instruction costs by `PhasedSize`."""
        num_stages = self._phases.setup.pipeline.num_stages
        edges = [(a, b) for b in range(num_stages) for a in range(b)]
        return replace(
            self._phases.setup.costs,
            stages=tuple(self._stage(index) for index in range(num_stages)),
            activation_bytes={edge: self._crossing(edge, "activation_bytes", "forward") for edge in edges},
            gradient_bytes={edge: self._crossing(edge, "gradient_bytes", "backward") for edge in edges},
        )

    def update_s(self, stage: int, round_index: int) -> float:
        """Return the seconds of an update, which is of the layers that its last backward runs through."""
        pipeline, moves = self._phases.setup.pipeline, self._phases
        last = (round_index + 1) * pipeline.round_size(stage) - 1
        return self._phases.at(moves.backward_layout(last)).costs.stages[stage].update_s

    def recomputing_s(self, stage: int, unit: int) -> float:
        """Return the part of a unit's backward, in seconds, that recomputes forwards."""
        size = self.size_of(unit)
        return float(self._phases.at(size.backward).costs.stages[stage].again_s.get(size.size, 0.0))

    def again_s(self, it: Instruction) -> float:
        """Return the seconds to recompute a unit's forward through a block."""
        block, size = self._phases.moving_block(it.peer, it.stage, it.number), self._plain_size(it.number)
        if not size:
            return 0.0
        return sum(self._phases.setup.profile.by_size[size][i].forward_s for i in range(block.start, block.stop))

    def num_bytes(self, it: Instruction) -> int:
        """Return the bytes of a transfer: of a block (`GIVE`), or of a unit's data for the block's backward."""
        setup, block = self._phases.setup, self._phases.moving_block(it.stage, it.peer, self._minibatch(it))
        held, trained = self._held_bytes(block)
        if it.op is Op.GIVE:
            return held + trained * setup.profile.state_bytes_per_byte
        return (held + self.read_bytes(it)) if self._plain_size(it.number) else 0

    def read_bytes(self, it: Instruction) -> int:
        """Return the bytes of the activations and inputs in a unit's data; the rest is the block's state."""
        block = self._phases.moving_block(it.stage, it.peer, self._minibatch(it))
        return _read_bytes(self._phases.setup, block, self._plain_size(it.number))

    def _minibatch(self, it: Instruction) -> int:
        return it.number if it.op is Op.GIVE else self._minibatch_of(it.number)

    def _size_of(self, unit: int) -> Any:
        minibatch, moves = self._minibatch_of(unit), self._phases
        return PhasedSize(self._plain_size(unit), moves.forward_layout(minibatch), moves.backward_layout(minibatch))

    def _stage(self, index: int) -> StageCosts:
        def table(field: str, way: str) -> _CostTable[float]:
            return _CostTable(
                lambda key: float(getattr(self._phases.at(getattr(key, way)).costs.stages[index], field)[key.size])
            )

        return replace(
            self._phases.setup.costs.stages[index],
            forward_s=table("forward_s", "forward"),
            backward_s=table("backward_s", "backward"),
            weight_s=table("weight_s", "backward"),
            load_s=table("load_s", "forward"),
            swap_bytes=_CostTable(partial(self._swapped, index)),
        )

    def _swapped(self, index: int, key: PhasedSize) -> int:
        """Return the bytes of a unit that a stage swaps: of those layers that it runs both forward and backward."""
        forward, backward = (self._phases.at(layout).plan.stages[index] for layout in (key.forward, key.backward))
        start, stop = max(forward.start, backward.start), min(forward.stop, backward.stop)
        memory = forward.memory[start - forward.start : stop - forward.start]
        own = replace(forward, start=start, stop=stop, memory=memory)
        return swapped_bytes(self._phases.setup.profile.by_size[key.size], own) if key.size else 0

    def _crossing(self, edge: tuple[int, int], field: str, way: str) -> _CostTable[int]:
        return _CostTable(
            lambda key: getattr(self._phases.at(getattr(key, way)).costs, field).get(edge, {}).get(key.size, 0)
        )


def _held_bytes(setup: Setup, block: BlockTransfer) -> tuple[int, int]:
    """Return the bytes of a block's parameters and buffers, and of those parameters that are trained."""
    held = tensors_of(setup.graph, setup.graph.layers[block.start : block.stop]).values()
    trained = (tensor for tensor in held if tensor.requires_grad)
    return sum(tensor.nbytes for tensor in held), sum(tensor.nbytes for tensor in trained)


def _read_bytes(setup: Setup, block: BlockTransfer, size: Size) -> int:
    """Return the bytes that a block reads for a unit: outputs of layers outside the block, and model inputs."""
    layers = setup.graph.layers[block.start : block.stop]
    values = {read for layer in layers for read in layer.reads if not block.start <= read < block.stop}
    fields = dict(zip(setup.graph.inputs, setup.dataset.inputs, strict=True))
    read = {fields[name] for layer in layers for name in layer.inputs}
    dataset = setup.dataset.of_length(size.columns) if isinstance(size, UnitShape) else setup.dataset
    example = dataset.example(size.num_samples if isinstance(size, UnitShape) else size) if read else {}
    rows = setup.profile.by_size[size]
    return sum(rows[value].output_bytes for value in values) + sum(example[name].nbytes for name in read)
