"""What a replica of a stage keeps in memory, in numbers: the profile, summed over stages.

What of it is there when, the instructions say: see `holding`.
"""

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipebench.model.plan import Plan, StagePlan
from pipebench.model.sampling import Size, UnitShape
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import RECOMPUTE, SWAP
from pipebench.schedule.pipeline import SPLIT, Pipeline
from pipebench.schedule.weights import WEIGHT_POLICIES, delay

# What bytes are kept for, in the order in which pictures stack them.
WEIGHTS, VERSIONS, MOVED, MASTERS = "weights", "older versions", "moved weights", "masters"
STATE, GRADIENTS, ACTIVATIONS, AGAIN = "optimizer state", "gradients", "activations", "computed again"
SENT, RECEIVED = "being sent", "received"
ON_HOST = "on the host"  # of a device's host, and no part of what the device keeps
KINDS: Final = (WEIGHTS, VERSIONS, MOVED, MASTERS, STATE, GRADIENTS, ACTIVATIONS, AGAIN, SENT, RECEIVED)
WHATEVER_SIZE: Final = KINDS[:6]  # what a replica holds of a model, however small its minibatches are
HELD: Final = KINDS[:7]  # what a replica holds between two instructions, which engines count in live tensors

Bytes = Mapping[Size, int]


@dataclass(frozen=True)
class StageMemoryCosts:
    """What one replica of a stage keeps, in bytes; mappings go from the samples in a unit, or its `UnitShape`.

    Where lengths vary, every unit is taken to be as long as the longest while it is kept: some day they all are.

    Attributes:
        weights: one version of its parameters, and as much their gradients.
        masters: what the optimizer steps on beside the versions; 0 where that is the newest of them.
        state: the optimizer's, once it has made a step.
        copies: sets of weights, as large as a version, that are kept for passes with moved ones.
        shares_moved: whether an update made between units that share moved weights keeps these for the later ones.
        in_place: whether updates overwrite the newest version whatever is in flight.
        unit: kept of a unit from its forward to the end of its backward.
        swapped: the part of it that is on the host in between.
        again: what a backward computes again of it.
        rest: kept of it between the two parts of a split backward.
        early_gradients: gradients that the input part of a split backward computes already.
        received, returned: of its activations and of their gradients, what comes from other workers.
        relayed: of what is received, what it doesn't keep and sends on when its forward is over.
    """

    weights: int
    masters: int
    state: int
    copies: int
    shares_moved: bool
    in_place: bool
    unit: Bytes
    swapped: Bytes
    again: Bytes
    rest: Bytes
    early_gradients: int
    received: Bytes
    returned: Bytes
    relayed: Bytes

    def most_bytes(self, size: Size, in_flight: int, versions: int) -> int:
        """Return what it keeps on its device at most, messages aside: vPipe (TPDS'21) eq. 1.

        Differs: of what units swap, three have it on the device at once: the one that runs forward or has just done so,
        the one that runs backward, and the one whose copy comes back.

        Args:
            size: of every unit.
            in_flight: how many units have run forward and not backward.
            versions: how many versions of its weights there are then.
        """
        once = self.masters + self.state + self.weights * (versions + 1 + self.copies)  # one more for gradients
        swapped = self.swapped[size]
        return once + in_flight * (self.unit[size] - swapped) + min(in_flight, 3) * swapped + self.again[size]


def stage_memories(
    profile: Profile, plan: Plan, pipeline: Pipeline, input_bytes: Mapping[Size, Mapping[str, int]] | None = None
) -> tuple[StageMemoryCosts, ...]:
    """Sum a profile over the stages of a plan.

    Args:
        profile: layer costs at every size that travels.
        plan: which layers make a stage, what crosses, and what a backward computes again.
        pipeline: the plan's, under a mode.
        input_bytes: size of a unit to the bytes of every model input: what layers keep that are recomputed, or
            whose backward is split. None: nothing.
    """
    inputs = input_bytes or {}
    return tuple(stage_memory(profile, plan, pipeline, index, inputs) for index in range(len(plan.stages)))


def stage_memory(
    profile: Profile, plan: Plan, pipeline: Pipeline, index: int, inputs: Mapping[Size, Mapping[str, int]]
) -> StageMemoryCosts:
    """Sum a profile over one stage of a plan; see `stage_memories`."""
    return replace(
        layers_memory(profile, plan.stages[index], pipeline, index, inputs),
        received=_crossing(profile, plan, pipeline, index, gradients=False),
        returned=_crossing(profile, plan, pipeline, index, gradients=True),
        relayed=_relayed(profile, plan, pipeline, index),
    )


def layers_memory(
    profile: Profile, stage: StagePlan, pipeline: Pipeline, index: int, inputs: Mapping[Size, Mapping[str, int]]
) -> StageMemoryCosts:
    """Sum a profile over layers that run as a stage, or as a part of one; of messages it knows nothing.

    Args:
        profile: layer costs at every size that travels.
        stage: the layers.
        pipeline: that they run in.
        index: of the stage.
        inputs: see `stage_memories`.
    """
    policy = WEIGHT_POLICIES[pipeline.weights]
    rows = next(iter(profile.layers.values()))
    own = [*range(stage.start, stage.stop)]
    sizes = {name: size for i in own for name, size in rows[i].parameter_sizes.items()}
    masters = {name: size for i in own for name, size in rows[i].master_sizes.items()}
    split = {name: size for i in own if rows[i].weight_s > 0 for name, size in rows[i].parameter_sizes.items()}
    weights = sum(sizes.values())
    stepped = sum((sizes | masters).values())
    moves = policy.moves(pipeline, index) and weights > 0
    unit, swapped, again, rest = _nothing(), _nothing(), _nothing(), _nothing()
    by_size = profile.by_size
    for size in by_size:
        longest = _longest(profile, size)
        at, fed = by_size[longest], inputs.get(longest, {})
        unit[size] = kept_bytes(at, stage, fed)
        swapped[size] = swapped_bytes(at, stage)
        again[size] = _again_bytes(at, stage)
        rest[size] = _kept_for_weights(at, own, fed)
    return StageMemoryCosts(
        weights=weights,
        masters=stepped if profile.has_masters else 0,
        state=stepped * profile.state_bytes_per_byte,
        copies=moves * (1 + (policy.corrects and delay(pipeline, index) > 0)),
        shares_moved=moves and policy.aim is not None,
        in_place=not policy.stashed,
        unit=unit,
        swapped=swapped,
        again=again,
        rest=rest,
        early_gradients=weights - sum(split.values()) if pipeline.backward == SPLIT else 0,
        received=dict.fromkeys(unit, 0),
        returned=dict.fromkeys(unit, 0),
        relayed=dict.fromkeys(unit, 0),
    )


def _nothing() -> dict[Size, int]:
    return {0: 0}


def _longest(profile: Profile, size: Size) -> Size:
    """Return the size of the longest unit of as many samples."""
    if not profile.lengths:
        return size
    num_samples = size.num_samples if isinstance(size, UnitShape) else size
    return UnitShape(num_samples, max(each.columns for each in profile.lengths))


def _layers(rows: Sequence[LayerProfile], stage: StagePlan) -> list[int]:
    """Return a stage's layers; the loss, the last row, goes with the last layer."""
    return [*range(stage.start, stage.stop + (stage.stop == len(rows) - 1))]


def swapped_bytes(rows: Sequence[LayerProfile], stage: StagePlan) -> int:
    """Return what of a unit goes to the host: what layers save that swap, but not what others of the stage keep, too.

    Args:
        rows: the layers at the unit's size.
        stage: which of them are its own, and what is done with the activations of each.
    """
    if not _with_policy(rows, stage, SWAP):
        return 0
    return kept_bytes(rows, stage, {}) - kept_bytes(rows, stage, {}, on_host=True)


def _with_policy(rows: Sequence[LayerProfile], stage: StagePlan, wanted: str) -> list[int]:
    policies = (*stage.memory, stage.memory[-1])  # what ends with the model's last layer takes the loss in
    own = _layers(rows, stage)
    return [i for i, policy in zip(own, policies, strict=False) if policy == wanted]


def _recomputed(rows: Sequence[LayerProfile], stage: StagePlan) -> list[int]:
    return _with_policy(rows, stage, RECOMPUTE)


def kept_bytes(
    rows: Sequence[LayerProfile], stage: StagePlan, inputs: Mapping[str, int], *, on_host: bool = False
) -> int:
    """Return what a stage keeps of a unit: what its layers save, and what runs of layers read that run again.

    A tensor that layers on both sides of a cut save is kept on both. Where a profile doesn't tell storages apart, what
    several runs read counts for each of them, and what layers save besides that don't run again.

    Args:
        rows: the layers at the unit's size.
        stage: which of them are its own, and what is done with the activations of each.
        inputs: bytes of every model input, for profiles that don't tell.
        on_host: whether what swapped layers save is gone.
    """
    if any(row.puts_out for row in rows):
        return sum(_held(rows, stage, on_host=on_host).values())
    again, total = {*_recomputed(rows, stage)}, 0
    gone = again | {*(_with_policy(rows, stage, SWAP) if on_host else ())}
    run, read, fed = stage.start, set[int](), set[str]()
    for index in _layers(rows, stage):
        row = rows[index]
        if index not in again:
            if index not in gone:
                # Where no layer before keeps it that saves it, too, it is this one's.
                total += row.saved_bytes
                total += sum(n for holder, n in row.saved_with if not _is_held(rows, stage, gone, holder, n))
            run, read, fed = index + 1, set(), set()
            continue
        fresh = {source for source in row.reads if source < run} - read
        total += sum(rows[source].output_bytes for source in fresh)
        total += sum(inputs.get(name, 0) for name in {*row.inputs} - fed)
        read, fed = read | fresh, fed | {*row.inputs}
    return total


def _held(rows: Sequence[LayerProfile], stage: StagePlan, *, on_host: bool) -> dict[int | tuple[int, int], int]:
    """Return the storages that a stage keeps of a unit, with their bytes; see `kept_bytes`.

    Every run of recomputed layers has a copy of its own of a buffer that a layer of the stage changes.
    """
    again, swapped = ({*_with_policy(rows, stage, policy)} for policy in (RECOMPUTE, SWAP))
    held: dict[int | tuple[int, int], int] = {}
    run = stage.start  # the first layer of those that are computed again together
    for index in _layers(rows, stage):
        if index in again:
            held.update(rows[index].takes)
            for source in rows[index].reads:
                own_copy = rows[source].runs_once and source >= stage.start
                for number, num_bytes in rows[source].puts_out if source < run else ():
                    held[(run, number) if own_copy else number] = num_bytes
            continue
        run = index + 1
        if not (on_host and index in swapped):
            held.update(rows[index].keeps)
    return held


def _again_bytes(rows: Sequence[LayerProfile], stage: StagePlan) -> int:
    """Return what a backward computes again: what recomputed layers save, but for what their runs read, which is kept.

    Where a profile doesn't tell storages apart, what a run reads counts, too, if nobody before it saves that.
    """
    again = _recomputed(rows, stage)
    if not any(row.puts_out for row in rows):
        return sum(rows[index].saved_bytes for index in again)
    total = 0
    for _, run in itertools.groupby(enumerate(again), lambda each: each[1] - each[0]):
        own = [index for _, index in run]
        sources = {source for index in own for source in rows[index].reads if source < own[0]}
        read = {number for source in sources for number, _ in rows[source].puts_out}
        read |= {number for index in own for number, _ in rows[index].takes}
        saved = {number: num_bytes for index in own for number, num_bytes in rows[index].keeps}
        total += sum(num_bytes for number, num_bytes in saved.items() if number not in read)
    return total


def _is_held(rows: Sequence[LayerProfile], stage: StagePlan, gone: Container[int], holder: int, num_bytes: int) -> bool:
    """Return whether a tensor that a layer saves is kept by it, or by one before it in its stage that saves it, too."""
    while holder >= stage.start and holder in gone and num_bytes > rows[holder].saved_bytes:
        # It isn't one that this layer is the first to save.
        holder = next((before for before, n in rows[holder].saved_with if n >= num_bytes), -1)
    return holder >= stage.start and holder not in gone


def _kept_for_weights(rows: Sequence[LayerProfile], own: Sequence[int], inputs: Mapping[str, int]) -> int:
    """Return what is left of a unit when the input part of its backward has run: inputs, and gradients of outputs."""
    split = [rows[i] for i in own if rows[i].weight_s > 0]
    read = {source for row in split for source in row.reads}
    fed = {name for row in split for name in row.inputs}
    kept = sum(rows[source].output_bytes for source in read) + sum(inputs.get(name, 0) for name in fed)
    return kept + sum(row.gradient_bytes for row in split)


def _crossing(profile: Profile, plan: Plan, pipeline: Pipeline, index: int, *, gradients: bool) -> dict[Size, int]:
    """Return what comes to a stage from other workers: activations, or the gradients of those that it sent."""
    positions, total = pipeline.positions, _nothing()
    for size, at in profile.by_size.items():
        total[size] = 0
        for (source, target), values in plan.crossings.items():
            if positions[source] == positions[target] or index != (source if gradients else target):
                continue
            total[size] += sum(at[value].gradient_bytes if gradients else at[value].output_bytes for value in values)
    return total


def _relayed(profile: Profile, plan: Plan, pipeline: Pipeline, index: int) -> dict[Size, int]:
    """Return what a stage receives from another worker, doesn't keep for its backward, and sends on."""
    positions, stage = pipeline.positions, plan.stages[index]
    come = {
        v for (s, t), values in plan.crossings.items() for v in values if t == index and positions[s] != positions[t]
    }
    on = {value for (source, _), values in plan.crossings.items() for value in values if source == index}
    total = _nothing()
    for size, at in profile.by_size.items():
        kept = {holder for i in _layers(at, stage) for holder, _ in at[i].saved_with}
        kept |= {source for i in _recomputed(at, stage) for source in at[i].reads}
        total[size] = sum(at[value].output_bytes for value in (come & on) - kept)
    return total
