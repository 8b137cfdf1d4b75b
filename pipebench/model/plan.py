"""Plans: which consecutive layers make a stage, and how many replicas run it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipebench.errors import PlanError, nearest
from pipebench.model.graph import LayerGraph


@dataclass(frozen=True)
class StagePlan:
    """Layers `start` to `stop` (excluded) on `replicas` workers."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class Plan:
    """Stages in order, and what crosses between them.

    Attributes:
        stages: at least one; together they hold every layer exactly once.
        crossings: (source stage, target stage) to the layers whose output the target reads, ascending.
    """

    stages: tuple[StagePlan, ...]
    crossings: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(stage.replicas for stage in self.stages)

    def __str__(self) -> str:
        """Return the papers' notation: `15-1`, `straight`, `16`."""
        if len(self.stages) > 1 and set(self.replicas) == {1}:
            return "straight"
        return "-".join(map(str, self.replicas))


class _Layer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...


class Cuttable(Protocol):
    """What can be cut: a traced model, or the layers of a profile."""

    @property
    def layers(self) -> Sequence[_Layer]:
        """Layers in order of execution."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices of the layers that the loss reads."""


def make_plan(graph: Cuttable, starts: Sequence[int], replicas: Sequence[int]) -> Plan:
    """Cut a graph before the layers `starts` (ascending, without 0).

    Raises:
        PlanError: an empty stage, or parameters or buffers that layers share in two stages.
    """
    bounds = [0, *starts, len(graph.layers)]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise PlanError(f"every stage needs at least one layer, but the cuts are before layers {list(starts)}")
    stages = tuple(StagePlan(a, b, r) for (a, b), r in zip(itertools.pairwise(bounds), replicas, strict=True))
    stage_of = [index for index, stage in enumerate(stages) for _ in range(stage.start, stage.stop)]
    _refuse_split_ties(graph, stage_of)
    crossing: dict[tuple[int, int], set[int]] = {}
    for index, layer in enumerate(graph.layers):
        for read in layer.reads:
            if stage_of[read] != stage_of[index]:
                crossing.setdefault((stage_of[read], stage_of[index]), set()).add(read)
    for index in graph.outputs:  # the loss runs in the last stage
        if stage_of[index] != len(stages) - 1:
            crossing.setdefault((stage_of[index], len(stages) - 1), set()).add(index)
    return Plan(stages, {edge: tuple(sorted(values)) for edge, values in sorted(crossing.items())})


def explicit_plan(graph: LayerGraph, cuts: Sequence[str], replicas: Sequence[int]) -> Plan:
    """Cut before the named layers.

    Raises:
        PlanError: an unknown layer, or layers out of order.
    """
    names = [layer.name for layer in graph.layers]
    starts = []
    for cut in cuts:
        try:
            starts.append(graph.index_of(cut))
        except KeyError:
            close = nearest(cut.replace(".", "_"), names)
            raise PlanError(f"parallelism.cuts: the model has no layer {cut!r}{close}") from None
    return make_plan(graph, starts, replicas)


def _refuse_split_ties(graph: Cuttable, stage_of: Sequence[int]) -> None:
    all_users: dict[tuple[str, str], list[int]] = {}
    for index, layer in enumerate(graph.layers):
        for name in layer.parameters:
            all_users.setdefault(("parameter", name), []).append(index)
        for name in layer.buffers:
            all_users.setdefault(("buffer", name), []).append(index)
    for (kind, name), users in all_users.items():
        stages = sorted({stage_of[index] for index in users})
        if len(stages) > 1:
            layers = ", ".join(graph.layers[index].name for index in users)
            raise PlanError(
                f"{kind} {name} is tied: layers {layers} share it and must stay in one stage, "
                f"but these cuts put them in stages {stages}; move parallelism.cuts or use plan: auto"
            )
