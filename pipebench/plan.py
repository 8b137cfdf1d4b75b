"""Plans: which consecutive layers make a stage, and how many replicas run it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipebench.errors import PlanError, nearest
from pipebench.graph import LayerGraph
from pipebench.profile.model import Profile


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


def make_plan(graph: LayerGraph, starts: Sequence[int], replicas: Sequence[int]) -> Plan:
    """Cut a graph before the layers `starts` (ascending, without 0).

    Raises:
        PlanError: an empty stage, or tied parameters in two stages.
    """
    bounds = [0, *starts, len(graph.layers)]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise PlanError(f"every stage needs at least one layer, but the cuts are before layers {list(starts)}")
    stages = tuple(StagePlan(a, b, r) for (a, b), r in zip(itertools.pairwise(bounds), replicas, strict=True))
    stage_of = [index for index, stage in enumerate(stages) for _ in range(stage.start, stage.stop)]
    _refuse_split_ties(graph, stage_of)
    crossing: dict[tuple[int, int], set[int]] = {}
    for layer in graph.layers:
        for read in layer.reads:
            if stage_of[read] != stage_of[layer.index]:
                crossing.setdefault((stage_of[read], stage_of[layer.index]), set()).add(read)
    for index in graph.outputs:  # the loss runs in the last stage
        if stage_of[index] != len(stages) - 1:
            crossing.setdefault((stage_of[index], len(stages) - 1), set()).add(index)
    return Plan(stages, {edge: tuple(sorted(values)) for edge, values in sorted(crossing.items())})


def balanced_plan(graph: LayerGraph, profile: Profile, num_samples: int, replicas: Sequence[int]) -> Plan:
    """Cut so that the slowest stage (forward plus backward, over its replicas) is as fast as compute alone allows.

    Exact for that cost by dynamic programming over cut points; communication is not weighed (the planner's part).
    Among equally fast cuts the one that sends the least wins.

    Raises:
        PlanError: more stages than layers, or tied parameters leave no place to cut.
    """
    rows = profile.layers[num_samples]
    num_layers, num_stages = len(graph.layers), len(replicas)
    cuts = [cut for cut in range(1, num_layers) if cut not in _cuts_between_ties(graph)]
    if num_stages - 1 > len(cuts):
        raise PlanError(f"{num_stages} stages were asked for, but the model can be cut in {len(cuts) + 1} at most")
    prefix = [0.0]
    for row in rows:
        prefix.append(prefix[-1] + row.forward_s + row.backward_s)
    crossing = {cut: _crossing_bytes(graph, rows, cut) for cut in cuts}
    # best[cut] = (slowest stage so far, bytes over the cuts so far, cuts), with the stages before `cut` placed
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for stage, r in enumerate(replicas):
        ends = [num_layers] if stage == num_stages - 1 else cuts
        best = _extend(best, ends, prefix, r, crossing)
    return make_plan(graph, best[num_layers][2], replicas)


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


def _extend(
    best: dict[int, tuple[float, int, tuple[int, ...]]],
    ends: Sequence[int],
    prefix: Sequence[float],
    replicas: int,
    crossing: dict[int, int],
) -> dict[int, tuple[float, int, tuple[int, ...]]]:
    extended: dict[int, Any] = {}
    for end in ends:
        stop = len(prefix) - 1 if end not in crossing else end  # the loss goes with the last layer
        options = (
            (
                max(slowest, (prefix[stop] - prefix[start]) / replicas),
                sent + crossing.get(end, 0),
                (*chosen, end) if end in crossing else chosen,
            )
            for start, (slowest, sent, chosen) in best.items()
            if start < end
        )
        found = min(options, default=None)
        if found is not None:
            extended[end] = found
    return extended


def _crossing_bytes(graph: LayerGraph, rows: Any, cut: int) -> int:
    read_later = {read for layer in graph.layers[cut:] for read in layer.reads} | set(graph.outputs)
    return sum(rows[i].output_bytes for i in read_later if i < cut)


def _users_of_parameters(graph: LayerGraph) -> dict[str, list[int]]:
    users: dict[str, list[int]] = {}
    for layer in graph.layers:
        for name in layer.parameters:
            users.setdefault(name, []).append(layer.index)
    return users


def _cuts_between_ties(graph: LayerGraph) -> set[int]:
    """Return the cut points that would separate two users of one parameter."""
    spans = [(min(users), max(users)) for users in _users_of_parameters(graph).values()]
    return {cut for first, last in spans for cut in range(first + 1, last + 1)}


def _refuse_split_ties(graph: LayerGraph, stage_of: Sequence[int]) -> None:
    for name, users in _users_of_parameters(graph).items():
        stages = sorted({stage_of[index] for index in users})
        if len(stages) > 1:
            layers = ", ".join(graph.layers[index].name for index in users)
            raise PlanError(
                f"parameter {name} is tied: layers {layers} share it and must stay in one stage, "
                f"but these cuts put them in stages {stages}; move parallelism.cuts or use plan: auto"
            )
