"""Plans: which consecutive layers form each stage, and how many replicas run it."""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from pipebench.errors import PlanError, nearest
from pipebench.formats import listed
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.notation import format_plan
from pipebench.schedule.pipeline import noam
from pipebench.schedule.placement import places as placed

if TYPE_CHECKING:
    from pipebench.model.graph import LayerGraph

PARAMETER, _BUFFER = "parameter", "buffer"  # kinds of tensors that layers may share
_MOST_NAMED = 6  # layers named in a message if none is similar to what was given


@dataclass(frozen=True)
class StagePlan:
    """The consecutive layers of one stage."""

    start: int  # index of its first layer
    stop: int  # index after its last layer
    replicas: int
    devices: tuple[int, ...]  # one per replica
    memory: tuple[str, ...]  # memory policy of each layer: `keep`, `recompute` or `swap`


@dataclass(frozen=True)
class Plan:
    """How a model is spread over devices."""

    mode: str
    stages: tuple[StagePlan, ...]  # at least one; together they hold every layer exactly once, in order of execution
    depth: int  # minibatches in flight per input-stage replica
    chunks: int = 1  # stages per worker, which share its device
    # (source stage, target stage) to the layers whose output goes from one to the other, ascending
    crossings: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    relay: bool = False  # whether a value that skips stages passes through each; else it goes directly to its readers
    ties: bool = False  # whether stages whose layers share a parameter may hold a copy each
    shard: str | None = None  # what replicas shard, if the planner has chosen it; None: as mode and recipe say

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def memory(self) -> tuple[str, ...]:
        """The memory policy of every layer."""
        return tuple(policy for stage in self.stages for policy in stage.memory)

    @cached_property
    def by_position(self) -> list[list[int]]:
        """The stages at every position in the pipeline, which share devices."""
        found: dict[tuple[int, ...], list[int]] = {}
        for index, stage in enumerate(self.stages):
            found.setdefault(tuple(sorted(stage.devices)), []).append(index)
        return [*found.values()]

    @property
    def positions(self) -> tuple[StagePlan, ...]:
        """The first stage at every position in the pipeline."""
        return tuple(self.stages[first] for first, *_ in self.by_position)

    @property
    def noam(self) -> int:
        """The depth that keeps every worker busy if transfers take no time: NOAM, PipeDream section 3.2."""
        return noam([stage.replicas for stage in self.positions])

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of every worker, in order of position."""
        return tuple(device for stage in self.positions for device in stage.devices)

    def on(self, devices: Sequence[int]) -> "Plan":
        """Return the plan with worker i on `devices[i]`."""
        new = dict(zip(self.devices, devices, strict=False))
        stages = (replace(stage, devices=tuple(new[device] for device in stage.devices)) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def __str__(self) -> str:
        """Return the papers' notation, replicas per position: `15-1`, `straight`, `16`."""
        return format_plan([stage.replicas for stage in self.positions])


class _Layer(Protocol):
    """What cutting needs to know of a layer."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...
    @property
    def runs_once(self) -> bool: ...


class Cuttable(Protocol):
    """A traced model, or the layers of a profile."""

    @property
    def layers(self) -> Sequence[_Layer]:
        """Layers in order of execution."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices of the layers that the loss reads."""


def make_plan(
    graph: Cuttable,
    starts: Sequence[int],
    replicas: Sequence[int],
    *,
    mode: str = "pipedream",
    devices: Sequence[Sequence[int]] | None = None,
    depth: int | None = None,
    chunks: int = 1,
    memory: str | Sequence[str] = KEEP,
    relay: bool = False,
    ties: bool = False,
) -> Plan:
    """Cut a graph into stages.

    Args:
        graph: the model or profile.
        starts: first layer of every stage but the first, ascending.
        replicas: per stage; with chunks, stages of one worker have equally many.
        mode: name of the mode.
        devices: per stage, one for every replica; None: 0, 1, ... in order of position, stages in a loop.
        depth: minibatches in flight per input-stage replica; None for NOAM.
        chunks: stages per worker, which share its device.
        memory: policy of every layer, or one for all; layers that run once are kept instead of recomputed.
        relay: see `Plan`.
        ties: see `Plan`.

    Raises:
        PlanError: a stage is empty, or layers of different stages share a buffer or, unless `ties`, a parameter.
    """
    bounds = [0, *starts, len(graph.layers)]
    check_bounds(bounds)
    given = [memory] * len(graph.layers) if isinstance(memory, str) else memory
    policies = as_they_run(graph.layers, given)
    cuts = zip(bounds, bounds[1:], replicas, devices or placed("", replicas, chunks), strict=False)
    stages = tuple(StagePlan(a, b, r, tuple(own), policies[a:b]) for a, b, r, own in cuts)
    for problem in split_ties(graph, stages, ties=ties):
        raise PlanError(f"{problem}; move parallelism.cuts or use plan: auto")
    crossed = crossings(graph, stage_of_layers(stages), len(stages) - 1, relay=relay)
    return Plan(mode, stages, depth or noam(replicas[: len(replicas) // chunks]), chunks, crossed, relay, ties)


def check_bounds(bounds: Sequence[int]) -> None:
    """Raise a PlanError unless there is a layer between any two neighbours of `bounds`, 0 to the number of layers."""
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise PlanError(f"every stage needs at least one layer, but the cuts are before layers {[*bounds[1:-1]]}")


def as_they_run(layers: Sequence[_Layer], memory: Sequence[str]) -> tuple[str, ...]:
    """Return the memory policies with `keep` in place of `recompute` for layers that run once."""
    pairs = zip(layers, memory, strict=True)
    return tuple(KEEP if layer.runs_once and policy == RECOMPUTE else policy for layer, policy in pairs)


def recut(graph: Cuttable, plan: Plan, starts: Sequence[int], memory: Sequence[str] | None = None) -> Plan:
    """Return a plan with other first layers of all stages but the first and, if given, other memory policies.

    Raises:
        PlanError: as `make_plan`.
    """
    devices = [stage.devices for stage in plan.stages]
    memory = plan.memory if memory is None else memory
    cut = make_plan(graph, starts, plan.replicas, devices=devices, memory=memory, relay=plan.relay, ties=plan.ties)
    return replace(plan, stages=cut.stages, crossings=cut.crossings)


def stage_of_layers(stages: Sequence[StagePlan]) -> list[int]:
    """Return the stage of every layer."""
    return [index for index, stage in enumerate(stages) for _ in range(stage.start, stage.stop)]


def crossings(
    graph: Cuttable, stage_of: Sequence[int], last: int, *, relay: bool
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return (source stage, target stage) to the layers whose output goes from one to the other, ascending.

    `stage_of` has the stage of every layer; `last` is the stage with the loss; `relay` is as in `Plan`.
    """
    crossing: dict[tuple[int, int], set[int]] = {}
    reads = [(read, stage_of[index]) for index, layer in enumerate(graph.layers) for read in layer.reads]
    for value, target in (*reads, *((index, last) for index in graph.outputs)):
        source = stage_of[value]
        hops = itertools.pairwise(range(source, target + 1)) if relay else [(source, target)] * (source != target)
        for hop in hops:
            crossing.setdefault(hop, set()).add(value)
    return {edge: tuple(sorted(values)) for edge, values in sorted(crossing.items())}


def starts_of_cuts(graph: "LayerGraph", cuts: Sequence[str]) -> list[int]:
    """Return the indices of the layers in `parallelism.cuts`; raises a PlanError if one is unknown or out of order."""
    names = [layer.name for layer in graph.layers]
    starts = []
    for cut in cuts:
        try:
            starts.append(graph.index_of(cut))
        except KeyError:
            raise PlanError(f"parallelism.cuts: {no_layer(cut, names)}") from None
    if starts != sorted(starts):
        in_order = ", ".join(names[start] for start in sorted(starts))
        raise PlanError(f"parallelism.cuts: got {', '.join(cuts)}, which is out of order: layers run as {in_order}")
    return starts


def no_layer(given: str, names: Sequence[str]) -> str:
    """Return a sentence about a name that no layer has, with the most similar name or else some of those that exist."""
    close = nearest(given.replace(".", "_"), names)
    return f"the model has no layer {given!r}{close or f'; its layers are {listed(names, _MOST_NAMED)}'}"


def memory_of(
    names: Sequence[str], recompute: Sequence[str], swap: Sequence[str] = (), *, others: str = KEEP
) -> tuple[str, ...]:
    """Return every layer's memory policy.

    Args:
        names: the layers.
        recompute: names, or patterns of names, of layers to recompute.
        swap: names, or patterns of names, of layers to swap.
        others: policy of all other layers.

    Raises:
        PlanError: a pattern matches no layer, or a layer matches patterns of both.
    """
    recomputed = _matching(names, recompute, "recompute_layers")
    swapped = _matching(names, swap, "swap_layers")
    both = [name for name in names if name in recomputed and name in swapped]
    if both:
        raise PlanError(
            f"parallelism.swap_layers: {swapped[both[0]]!r} names layer {both[0]!r}, and recompute_layers does so as "
            f"{recomputed[both[0]]!r}: allowed is one of the two"
        )
    return tuple(RECOMPUTE if name in recomputed else SWAP if name in swapped else others for name in names)


def _matching(names: Sequence[str], patterns: Sequence[str], key: str) -> dict[str, str]:
    """Return the names that match a pattern, each with the first pattern that it matches."""
    found: dict[str, str] = {}
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise PlanError(f"parallelism.{key}: {no_layer(pattern, names)}")
        for name in matching:
            found.setdefault(name, pattern)
    return found


def split_ties(graph: Cuttable, stages: Sequence[StagePlan], *, ties: bool = False) -> Iterator[str]:
    """Yield a sentence on every buffer and, unless `ties`, every parameter that layers of different stages share."""
    stage_of = stage_of_layers(stages)
    for (kind, name), users in shared(graph.layers).items():
        found = sorted({stage_of[index] for index in users})
        if len(found) == 1 or (ties and kind == PARAMETER):
            continue
        yield f"{_tied(graph.layers, kind, name, users)}, but these cuts put them in stages {found}"


def shared(layers: Sequence[_Layer]) -> dict[tuple[str, str], list[int]]:
    """Return (kind, name) of every shared parameter and buffer to the layers that share it, ascending."""
    users: dict[tuple[str, str], list[int]] = {}
    for index, layer in enumerate(layers):
        for kind, names in ((PARAMETER, layer.parameters), (_BUFFER, layer.buffers)):
            for name in names:
                users.setdefault((kind, name), []).append(index)
    return {key: own for key, own in users.items() if len(own) > 1}


def tied_parameters(layers: Sequence[_Layer], plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """Return the stages that have copies of the same parameters to those parameters' names, in order of stages."""
    found: dict[tuple[int, ...], list[str]] = {}
    if plan.ties:
        stage_of = stage_of_layers(plan.stages)
        for (kind, name), users in shared(layers[: len(stage_of)]).items():
            stages = tuple(sorted({stage_of[index] for index in users}))
            if kind == PARAMETER and len(stages) > 1:
                found.setdefault(stages, []).append(name)
    return dict(sorted(found.items()))


def _tied(layers: Sequence[_Layer], kind: str, name: str, users: Sequence[int]) -> str:
    """Return a sentence on the layers that share a tensor, and where copies of it would be allowed."""
    sharing = ", ".join(layers[index].name for index in users)
    # Copies stay equal only if all stages' updates are of the same minibatches; see docs/modes.md.
    where = (
        ", except under modes whose stages update together (those with a flush, and pipedream-2bw), where no layers "
        "move and parallelism.shard isn't optimizer"
    )
    return (
        f"{kind} {name} is tied: layers {sharing} share it and must stay in one stage"
        f"{where if kind == PARAMETER else ''}"
    )


def stay_together(layers: Sequence[str], parameter: str, stage: int) -> str:
    """Return a sentence on layers that share a parameter in one stage."""
    return f"{' and '.join(layers)} share {parameter} and stay together in stage {stage}"


def too_few_places(layers: Sequence[_Layer], problem: str, *, ties: bool) -> str:
    """Return `problem`, that a model can be cut in too few places, with the tie that spans the most layers, if any.

    `ties` is as in `Plan`.
    """
    together = (tie for tie in shared(layers).items() if not (ties and tie[0][0] == PARAMETER))
    widest = max(together, key=lambda tie: tie[1][-1] - tie[1][0], default=None)
    return problem if widest is None else f"{problem}; {_tied(layers, *widest[0], widest[1])}"
