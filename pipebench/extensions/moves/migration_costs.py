"""Simulated costs while layers move: passes under their units' cuts, and the transfers.

A unit's size, the key of cost tables, includes the cuts of its forward and backward here, so the simulator needs no
change; tables are filled on demand.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.repartition_plan import BlockTransfer, CutLayout
from pipebench.extensions.moves.segment_cuts import SegmentCuts
from pipebench.model.graph import attribute
from pipebench.model.sampling import Size, UnitShape
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.simulate.costs import Costs, StageCosts
from pipebench.simulate.memory import swapped_bytes

N = TypeVar("N", int, float)
_SIZES_KEPT = 1024  # more than there are units in flight


class PhasedSize(NamedTuple):
    """The size of a unit with its cuts, the key of costs while layers move."""

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
    """The costs of a segment in which layers may move; the arguments map units to sizes and minibatches."""

    def __init__(self, phases: SegmentCuts, size_of: Callable[[int], Size], minibatch_of: Callable[[int], int]) -> None:
        self._phases = phases
        self._plain_size = size_of
        self._minibatch_of = minibatch_of
        self.size_of = lru_cache(maxsize=_SIZES_KEPT)(self._size_of)

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
        """Return the seconds of an update, for the layers of its last backward's cuts."""
        pipeline, moves = self._phases.setup.pipeline, self._phases
        last = (round_index + 1) * pipeline.round_size(stage) - 1
        return self._phases.at(moves.backward_layout(last)).costs.stages[stage].update_s

    def recomputing_s(self, stage: int, unit: int) -> float:
        """Return the seconds of a unit's backward that recompute forwards."""
        size = self.size_of(unit)
        return float(self._phases.at(size.backward).costs.stages[stage].again_s.get(size.size, 0.0))

    def again_s(self, it: Instruction) -> float:
        """Return the seconds to recompute a unit's forward through a block."""
        block, size = self._phases.handed(it.peer, it.stage, it.number), self._plain_size(it.number)
        if not size:
            return 0.0
        return sum(self._phases.setup.profile.by_size[size][i].forward_s for i in range(block.start, block.stop))

    def num_bytes(self, it: Instruction) -> int:
        """Return the bytes of a transfer: a unit's data for a block, or the block itself."""
        setup, block = self._phases.setup, self._phases.handed(it.stage, it.peer, self._minibatch(it))
        parameters, buffers = _held_bytes(setup, block)
        if it.op is Op.GIVE:
            return buffers + parameters * (1 + setup.profile.state_bytes_per_byte)
        return (buffers + parameters + self.read_bytes(it)) if self._plain_size(it.number) else 0

    def read_bytes(self, it: Instruction) -> int:
        """Return the bytes of a transferred unit's activations and inputs; the rest is weights, buffers and states."""
        block = self._phases.handed(it.stage, it.peer, self._minibatch(it))
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
        """Return the bytes of a unit that a stage swaps: only of layers that it runs both forward and backward."""
        one, other = (self._phases.at(layout).plan.stages[index] for layout in (key.forward, key.backward))
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        own = replace(one, start=start, stop=stop, memory=one.memory[start - one.start : stop - one.start])
        return swapped_bytes(self._phases.setup.profile.by_size[key.size], own) if key.size else 0

    def _crossing(self, edge: tuple[int, int], field: str, way: str) -> _CostTable[int]:
        return _CostTable(
            lambda key: getattr(self._phases.at(getattr(key, way)).costs, field).get(edge, {}).get(key.size, 0)
        )


def _held_bytes(setup: Setup, block: BlockTransfer) -> tuple[int, int]:
    """Return the bytes of a block's parameters and of its buffers."""
    layers = setup.graph.layers[block.start : block.stop]
    parameters = {name for layer in layers for name in layer.parameters}
    buffers = {name for layer in layers for name in layer.buffers}
    return _bytes_of(setup, parameters), _bytes_of(setup, buffers)


def _bytes_of(setup: Setup, names: Iterable[str]) -> int:
    return sum(attribute(setup.graph.root, name).nbytes for name in names)


def _read_bytes(setup: Setup, block: BlockTransfer, size: Size) -> int:
    """Return the bytes that a block's layers read in a unit: other layers' outputs and model inputs."""
    layers = setup.graph.layers[block.start : block.stop]
    values = {read for layer in layers for read in layer.reads if not block.start <= read < block.stop}
    fields = dict(zip(setup.graph.inputs, setup.dataset.inputs, strict=True))
    read = {fields[name] for layer in layers for name in layer.inputs}
    dataset = setup.dataset.of_length(size.columns) if isinstance(size, UnitShape) else setup.dataset
    example = dataset.example(size.num_samples if isinstance(size, UnitShape) else size) if read else {}
    rows = setup.profile.by_size[size]
    return sum(rows[value].output_bytes for value in values) + sum(example[name].nbytes for name in read)
