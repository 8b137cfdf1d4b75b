"""Bytes that a stage's replica holds, by kind: a profile summed over stages.

`replica_memory` says at which instructions they are allocated and freed.
"""

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from pipebench.model.plan import Plan, StagePlan
from pipebench.model.sampling import Size, UnitShape
from pipebench.profile.model import LayerProfile, ParameterBytes, Profile
from pipebench.schedule.modes import RECOMPUTE, SWAP
from pipebench.schedule.pipeline import SPLIT, Pipeline
from pipebench.schedule.weights import WEIGHT_POLICIES

Bytes = Mapping[Size, int]


@dataclass(frozen=True)
class StageMemoryCosts:
    """Bytes that one replica of a stage holds; mappings are by size of a unit, samples or a `UnitShape`.

    If lengths vary, every unit is counted with the longest.
    """

    weights: int  # one version of the trained parameters, or of the replica's shard of them
    untrained: int  # untrained parameters and buffers: a single version, whole on every replica
    gathered: int  # one version of all trained parameters, and the size of their gradients
    scattered: int  # gradients after they are summed: all, or the replica's shard
    masters: int  # master weights besides the versions; 0 if the optimizer updates the newest version
    state: int  # the optimizer's, from its first step on
    copies: int  # extra sets of weights, for passes with predicted weights
    shares_moved: bool  # whether predicted weights outlive an update, for later units that use the same
    in_place: bool  # whether updates overwrite the newest version though units in flight have used it
    unit: Bytes  # activations of a unit, from its forward to the end of its backward
    swapped: Bytes  # part of `unit` that is on the host in between
    again: Bytes  # activations that a backward recomputes
    workspace: Bytes  # the largest of any layer, while a pass runs
    rest: Bytes  # of a unit, between the two parts of a split backward
    early_gradients: int  # gradients of parameters that the input part of a split backward computes
    received: Bytes  # a unit's activations from other workers
    returned: Bytes  # a unit's gradients from other workers
    relayed: Bytes  # part of `received` that is not kept for the backward but sent on after the forward

    def most_bytes(self, size: Size, in_flight: int, versions: int) -> int:
        """Return the peak on the device without messages, with units of one size: vPipe (TPDS'21) equation 1.

        Differs: of swapped units, three are on the device: one that runs forward or is copied out, one that runs
        backward, and one that is copied back.

        Args:
            size: of all units.
            in_flight: units between forward and backward.
            versions: weight versions held then.
        """
        gathered = self.gathered - self.weights  # while a pass runs
        once = self.untrained + self.masters + self.state + gathered + self.gathered
        once += self.weights * (versions + self.copies)
        swapped = self.swapped[size]
        return (
            once
            + in_flight * (self.unit[size] - swapped)
            + min(in_flight, 3) * swapped
            + self.again[size]
            + self.workspace[size]
        )


def stage_memories(
    profile: Profile, plan: Plan, pipeline: Pipeline, input_bytes: Mapping[Size, Mapping[str, int]] | None = None
) -> tuple[StageMemoryCosts, ...]:
    """Return the bytes that replicas of every stage of a plan hold.

    Args:
        profile: layers in the plan's order.
        plan: its stages.
        pipeline: the plan's, in its mode.
        input_bytes: by size of a unit, the bytes of each model input, which recomputed layers and layers with a split
            backward keep; None: 0.
    """
    inputs = input_bytes or {}
    return tuple(stage_memory(profile, plan, pipeline, index, inputs) for index in range(len(plan.stages)))


def stage_memory(
    profile: Profile, plan: Plan, pipeline: Pipeline, index: int, inputs: Mapping[Size, Mapping[str, int]]
) -> StageMemoryCosts:
    """Return the bytes that a replica of one stage holds; see `stage_memories`."""
    return replace(
        layers_memory(profile, plan.stages[index], pipeline, index, inputs),
        received=_crossing(profile, plan, pipeline, index, gradients=False),
        returned=_crossing(profile, plan, pipeline, index, gradients=True),
        relayed=_relayed(profile, plan, pipeline, index),
    )


def layers_memory(
    profile: Profile, stage: StagePlan, pipeline: Pipeline, index: int, inputs: Mapping[Size, Mapping[str, int]]
) -> StageMemoryCosts:
    """Return the bytes that layers hold which run as a stage or as a part of one, without messages."""
    policy = WEIGHT_POLICIES[pipeline.weights]
    rows = profile.rows
    own = [*range(stage.start, stage.stop)]
    weights, stepped, untrained = ParameterBytes.of(rows[i] for i in own)
    split = ParameterBytes.of(rows[i] for i in own if rows[i].weight_s > 0).trained
    num_shards = pipeline.replicas[index] if pipeline.is_sharded else 1
    stepped, scattered = (-(-each // num_shards) for each in (stepped, weights))
    moves = policy.moves(pipeline, index) and weights > 0
    unit, swapped, again, rest = _nothing(), _nothing(), _nothing(), _nothing()
    for size in (by_size := profile.by_size):
        longest = _longest(profile, size)
        at, fed = by_size[longest], inputs.get(longest, {})
        unit[size] = kept_bytes(at, stage, fed)
        swapped[size] = swapped_bytes(at, stage)
        again[size] = _again_bytes(at, stage)
        rest[size] = _saved_for_weights(at, own, fed)
    return StageMemoryCosts(
        weights=scattered if pipeline.gathers else weights,
        untrained=untrained,
        gathered=weights,
        scattered=scattered,
        masters=stepped if profile.has_masters else 0,
        state=stepped * profile.state_bytes_per_byte,
        copies=moves * policy.copies,
        shares_moved=moves and policy.aim is not None,
        in_place=not policy.stashed,
        unit=unit,
        swapped=swapped,
        again=again,
        workspace=_workspaces(profile, stage),
        rest=rest,
        early_gradients=weights - split if pipeline.backward == SPLIT else 0,
        received=dict.fromkeys(unit, 0),
        returned=dict.fromkeys(unit, 0),
        relayed=dict.fromkeys(unit, 0),
    )


def _nothing() -> dict[Size, int]:
    return {0: 0}


def _workspaces(profile: Profile, stage: StagePlan) -> dict[Size, int]:
    """Return the largest workspace of a stage's layers, by size of a unit."""
    at_sizes = ((size, profile.by_size[_longest(profile, size)]) for size in profile.by_size)
    return _nothing() | {size: max(at[i].workspace_bytes for i in _layers(at, stage)) for size, at in at_sizes}


def _longest(profile: Profile, size: Size) -> Size:
    """Return the size of the longest unit with as many samples."""
    if not profile.lengths:
        return size
    num_samples = size.num_samples if isinstance(size, UnitShape) else size
    return UnitShape(num_samples, max(each.columns for each in profile.lengths))


def _layers(rows: Sequence[LayerProfile], stage: StagePlan) -> list[int]:
    """Return a stage's layers; the loss, the last row, goes with the last layer."""
    return [*range(stage.start, stage.stop + (stage.stop == len(rows) - 1))]


def swapped_bytes(rows: Sequence[LayerProfile], stage: StagePlan) -> int:
    """Return a unit's bytes on the host: what layers that swap save, and other layers of the stage don't keep."""
    if not _with_policy(rows, stage, SWAP):
        return 0
    return kept_bytes(rows, stage, {}) - kept_bytes(rows, stage, {}, on_host=True)


def _with_policy(rows: Sequence[LayerProfile], stage: StagePlan, wanted: str) -> list[int]:
    policies = (*stage.memory, stage.memory[-1])  # the loss goes with the last layer
    own = _layers(rows, stage)
    return [i for i, policy in zip(own, policies, strict=False) if policy == wanted]


def kept_bytes(
    rows: Sequence[LayerProfile], stage: StagePlan, inputs: Mapping[str, int], *, on_host: bool = False
) -> int:
    """Return a unit's bytes kept by a stage: what its layers save, and the inputs of runs of recomputed layers.

    A tensor saved on both sides of a cut is kept on both. If a profile doesn't identify storages, a value that several
    runs read counts for each of them, even if other layers also save it.

    Args:
        rows: all layers at the size of a unit, the loss last.
        stage: which of them, with their policies.
        inputs: bytes of model inputs, for profiles that don't identify storages.
        on_host: whether to leave out what swapped layers save.
    """
    if any(row.output_storages for row in rows):
        return sum(_held(rows, stage, on_host=on_host).values())
    again, total = {*_with_policy(rows, stage, RECOMPUTE)}, 0
    gone = again | {*(_with_policy(rows, stage, SWAP) if on_host else ())}
    run, read, fed = stage.start, set[int](), set[str]()
    for index in _layers(rows, stage):
        row = rows[index]
        if index not in again:
            if index not in gone:
                # A tensor that no earlier layer keeps is this layer's.
                total += row.saved_bytes
                shared = (n for holder, n in row.saved_with if first_that_keeps(rows, gone, holder, n) < stage.start)
                total += sum(shared)
            run, read, fed = index + 1, set(), set()
            continue
        fresh = {source for source in row.reads if source < run} - read
        total += sum(rows[source].output_bytes for source in fresh)
        total += sum(inputs.get(name, 0) for name in {*row.inputs} - fed)
        read, fed = read | fresh, fed | {*row.inputs}
    return total


def _held(rows: Sequence[LayerProfile], stage: StagePlan, *, on_host: bool) -> dict[int | tuple[int, int], int]:
    """Return the bytes of a unit's storages that a stage keeps, by storage; see `kept_bytes`.

    Every run of recomputed layers has its own copy of a buffer that a layer of the stage returns and others change.
    """
    again, swapped = ({*_with_policy(rows, stage, policy)} for policy in (RECOMPUTE, SWAP))
    held: dict[int | tuple[int, int], int] = {}
    run = stage.start  # first layer of a recomputed run
    for index in _layers(rows, stage):
        if index in again:
            held.update(rows[index].input_storages)
            for source in rows[index].reads:
                own_copy = rows[source].runs_once and source >= stage.start
                for number, num_bytes in rows[source].output_storages if source < run else ():
                    held[(run, number) if own_copy else number] = num_bytes
            continue
        run = index + 1
        if not (on_host and index in swapped):
            held.update(rows[index].saved_storages)
    return held


def _again_bytes(rows: Sequence[LayerProfile], stage: StagePlan) -> int:
    """Return the bytes that a backward recomputes: what recomputed layers save, without the inputs of their runs.

    If a profile doesn't identify storages, inputs count unless an earlier layer saves them.
    """
    again = _with_policy(rows, stage, RECOMPUTE)
    if not any(row.output_storages for row in rows):
        return sum(rows[index].saved_bytes for index in again)
    total = 0
    for _, run in itertools.groupby(enumerate(again), lambda each: each[1] - each[0]):
        own = [index for _, index in run]
        sources = {source for index in own for source in rows[index].reads if source < own[0]}
        read = {number for source in sources for number, _ in rows[source].output_storages}
        read |= {number for index in own for number, _ in rows[index].input_storages}
        saved = {number: num_bytes for index in own for number, num_bytes in rows[index].saved_storages}
        total += sum(num_bytes for number, num_bytes in saved.items() if number not in read)
    return total


def first_that_keeps(rows: Sequence[LayerProfile], gone: Container[int], holder: int, num_bytes: int) -> int:
    """Return the last layer at or before `holder` that saves this tensor and keeps it; -1 if all such are `gone`."""
    while holder in gone and num_bytes > rows[holder].saved_bytes:  # some earlier layer also saves it
        holder = next((before for before, n in rows[holder].saved_with if n >= num_bytes), -1)
    return -1 if holder in gone else holder


def _saved_for_weights(rows: Sequence[LayerProfile], own: Sequence[int], inputs: Mapping[str, int]) -> int:
    """Return a unit's bytes after the input part of its backward: inputs of layers, and gradients of their outputs."""
    split = [rows[i] for i in own if rows[i].weight_s > 0]
    read = {source for row in split for source in row.reads}
    fed = {name for row in split for name in row.inputs}
    inputs_bytes = sum(rows[source].output_bytes for source in read) + sum(inputs.get(name, 0) for name in fed)
    return inputs_bytes + sum(row.gradient_bytes for row in split)


def _crossing(profile: Profile, plan: Plan, pipeline: Pipeline, index: int, *, gradients: bool) -> dict[Size, int]:
    """Return the bytes per unit that a stage receives from other workers: activations, or gradients."""
    total = _nothing()
    for size, at in profile.by_size.items():
        total[size] = 0
        for (source, target), values in plan.crossings.items():
            if pipeline.is_local(source, target) or index != (source if gradients else target):
                continue
            total[size] += sum(at[value].gradient_bytes if gradients else at[value].output_bytes for value in values)
    return total


def _relayed(profile: Profile, plan: Plan, pipeline: Pipeline, index: int) -> dict[Size, int]:
    """Return the bytes per unit that a stage receives from another worker, sends on, and doesn't keep."""
    stage, crossings = plan.stages[index], plan.crossings.items()
    come = {v for (s, t), values in crossings for v in values if t == index and not pipeline.is_local(s, t)}
    on = {value for (source, _), values in crossings for value in values if source == index}
    total = _nothing()
    for size, at in profile.by_size.items():
        saved = {holder for i in _layers(at, stage) for holder, _ in at[i].saved_with}
        saved |= {source for i in _with_policy(at, stage, RECOMPUTE) for source in at[i].reads}
        total[size] = sum(at[value].output_bytes for value in (come & on) - saved)
    return total
