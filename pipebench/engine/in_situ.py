"""In-situ profiling: each worker runs its list of instructions alone, to measure what layers cost in use.

A profile times layers one by one, and optimizer steps back to back. In use there is also the engine's Python, gradient
accumulation and a stage's graph; several minibatches are in flight; and caches are cold. On CPUs an update then takes
twice as long as consecutive steps do.

So workers run their own lists for a few minibatches, one worker after the other, without waiting. Activations from
other stages are copies of those that these sent when they were measured; gradients are zeros. Samples may differ in
length, so a unit must have the samples of the copied activations: all units of a row, one of every replica, have the
same samples.

The seconds of an instruction are the sum over a stage's layers. They are divided among the layers as in the profile.

Workers compute on copies, which are freed before the next worker's: beside the model itself, measuring takes the memory
that training the largest stage takes, or the largest worker's stages.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from pipebench import formats
from pipebench.engine.feed import Feed
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.model.allocator import release_copies
from pipebench.model.graph import cloned
from pipebench.model.values import detached, differentiable
from pipebench.profile.clocks import Reading, device_clock
from pipebench.profile.enough import StopRule
from pipebench.profile.model import LayerProfile, ParameterBytes, Profile
from pipebench.schedule.instructions import BACKWARDS, Instruction
from pipebench.schedule.modes import KEEP
from pipebench.schedule.operations import GRADIENT, Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import NOTHING, programs
from pipebench.schedule.syncs import NOT_SHARDED

_PERIODS = 2  # of the pipeline, in a segment after the minibatches that fill it
_RULE = StopRule(most=9, most_s=6.0)
_TIMED = (Op.LOAD_INPUT, Op.FORWARD, *BACKWARDS, Op.UPDATE)


class Key(NamedTuple):
    """A timed instruction."""

    op: Op
    stage: int
    num_samples: int  # of its unit; 0 for an update


InSituTimes = Mapping[Key, float]  # seconds


def profile_in_situ(
    setup: Setup, agree: Callable[[bool], bool], now: Callable[[], float] = time.perf_counter, rule: StopRule = _RULE
) -> InSituTimes:
    """Run training on copies of the model, every stage by its first replica; return seconds per instruction.

    The seconds are means within a segment, since a run's time is a sum, and medians over segments. The first segment is
    a warm-up and not counted, unless it is long.

    Args:
        setup: its workers run one after the other, except those that need each other's messages.
        agree: called before every segment with whether this process needs no more segments; returns whether none does.
            It waits for the other processes, so that all compute at the same time, as in training.
        now: the host's clock in seconds, for CPUs; GPUs time instructions by events.
        rule: how many segments are enough; its seconds are divided among the workers.
    """
    sent: _Sent = {}
    found: dict[Key, float] = {}
    groups = _in_order(setup.pipeline)
    rule = replace(rule, most_s=rule.most_s / len(groups))
    with torch.random.fork_rng([]):
        for indices in groups:
            player = _ListPlayer(_keeping(setup), indices, sent)
            found |= _medians(partial(player.play, now), agree, rule)
            player.close()
            release_copies(setup.device, setup.graph.root)
    return found


def least_bytes(setup: Setup) -> float:
    """Return the bytes of gradients and optimizer state that `profile_in_situ` holds at once, for the largest group.

    Beside them are copies of parameters, in memory that measuring layers has taken, and activations.
    """
    profile, stages = setup.profile, setup.plan.stages
    state = profile.state_bytes_per_byte + profile.has_masters

    def of_worker(index: int) -> float:
        own = (stages[stage] for stage in setup.pipeline.stages_of(index))
        held = [ParameterBytes.of(profile.rows[stage.start : stage.stop]) for stage in own]
        return sum(each.trained + each.stepped * state for each in held)

    return max(sum(map(of_worker, group)) for group in _in_order(setup.pipeline))


def _in_order(pipeline: Pipeline) -> list[list[int]]:
    """Return the workers of every stage's first replica, in groups that need activations from earlier groups only."""
    groups: list[list[int]] = []
    last_stage = -1
    for index in sorted({pipeline.worker(stage, 0) for stage in range(pipeline.num_stages)}, key=pipeline.stages_of):
        stages = pipeline.stages_of(index)
        if stages[0] > last_stage:
            groups.append([])
        groups[-1].append(index)
        last_stage = max(last_stage, stages[-1])
    return groups


def _medians(play: Callable[[], dict[Key, float]], agree: Callable[[bool], bool], rule: StopRule) -> InSituTimes:
    """Play segments until all processes have enough; return the medians of the instructions' seconds."""
    taken: dict[Key, list[float]] = defaultdict(list)
    spent_s = 0.0
    for segment in count():
        if agree(bool(taken) and rule.is_met([*taken.values()], spent_s)):
            return {key: statistics.median(each) for key, each in taken.items()}
        start_s = time.perf_counter()
        found = play()
        took_s = time.perf_counter() - start_s
        if segment > 0 or took_s >= rule.long_s:
            spent_s += took_s
            for key, seconds in found.items():
                taken[key].append(seconds)
    raise AssertionError("segments go on until all processes have enough")


def entries(profiled_in_situ: InSituTimes) -> list[list[Any]]:
    """Return measurements as JSON values, in the form that `mean` takes."""
    return [[key.op.name, key.stage, key.num_samples, seconds] for key, seconds in profiled_in_situ.items()]


def mean(found: Sequence[Sequence[Sequence[Any]]]) -> InSituTimes:
    """Return the mean of several processes' measurements, which were made at the same time, as in training."""
    seconds: dict[Key, list[float]] = defaultdict(list)
    for process in found:
        for op, stage, num_samples, taken_s in process:
            seconds[Key(Op[op], stage, num_samples)].append(taken_s)
    return {key: statistics.fmean(each) for key, each in seconds.items()}


def in_use(profile: Profile, setup: Setup, profiled_in_situ: InSituTimes) -> Profile:
    """Return a profile whose layers add up, stage by stage, to the in-situ measurements of a setup.

    Sizes without a measurement are scaled as the nearest measured size is.
    """
    sizes = sorted({key.num_samples for key in profiled_in_situ if key.op is Op.FORWARD})
    bounds = [range(stage.start, stage.stop) for stage in setup.plan.stages]
    bounds[-1] = range(bounds[-1].start, bounds[-1].stop + 1)  # the loss is the last stage's

    def scaled(size: int) -> tuple[LayerProfile, ...]:
        near, rows = min(sizes, key=lambda other: abs(other - size)), profile.layers[size]
        return tuple(
            _scaled(rows[i], ratios)
            for stage, indices in enumerate(bounds)
            for ratios in [_ratios([profile.layers[near][i] for i in indices], profiled_in_situ, stage, near)]
            for i in indices
        )

    layers = {size: scaled(size) for size in profile.layers}
    # All stages are in this process, so one may read what the data set has cached for another: the longest counts.
    # Waiting for loader processes says nothing of how long they load.
    waits = {key: seconds for key, seconds in profiled_in_situ.items() if key.op is Op.LOAD_INPUT}
    loaded = waits if fetches_itself(setup) else {}
    loads = {size: max(s for key, s in loaded.items() if key.num_samples == size) for _, _, size in loaded}
    rows = profile.layers[sizes[0]]
    held = [ParameterBytes.of(rows[i] for i in indices).trained for indices in bounds]
    stages = [(num_bytes, Key(Op.UPDATE, stage, 0)) for stage, num_bytes in enumerate(held)]
    steps = [(num_bytes, profiled_in_situ[key]) for num_bytes, key in stages if num_bytes and key in profiled_in_situ]
    floor_s, s_per_byte = update_costs(steps)
    before_s, after_s = (sum(map(_seconds, each[sizes[-1]])) for each in (profile.layers, layers))
    longer = f"{after_s / before_s:.3g}x as long while all workers compute, at {formats.num_samples(sizes[-1])}"
    return replace(
        profile,
        note=f"{profile.note}; {longer}",
        layers=layers,
        load_s={**profile.load_s, **loads},
        update_floor_s=floor_s,
        update_s_per_byte=s_per_byte,
    )


def fetches_itself(setup: Setup) -> bool:
    """Return whether a worker loads its inputs itself, without loader processes."""
    return setup.dataset.loader_processes == 0


def update_costs(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return an update's fixed seconds and its seconds per byte, from the bytes and the seconds of stages' updates.

    They are those of a least-squares line: through 0 if it would start below 0, and level if it would fall.
    """
    if not steps:
        return 0.0, 0.0
    num_bytes, seconds = zip(*steps, strict=True)
    if min(num_bytes) < max(num_bytes):
        slope, floor_s = statistics.linear_regression(num_bytes, seconds)
        if slope < 0:
            return statistics.fmean(seconds), 0.0
        if floor_s >= 0:
            return floor_s, slope
    return 0.0, sum(n * s for n, s in steps) / sum(n**2 for n in num_bytes)


class _ListPlayer:
    """Plays the lists of some workers of a setup; messages are copies of those that all have sent so far."""

    def __init__(self, setup: Setup, indices: Sequence[int], sent: "_Sent") -> None:
        self._setup, self._indices, self._others = setup, indices, _Others(sent)
        self._workers = [Worker(setup, index) for index in indices]
        pipeline, sampler = setup.pipeline, setup.sampler
        whole = [k for k in range(sampler.minibatches_per_epoch) if sampler.size(k) == sampler.size(0)]
        wanted = _PERIODS * pipeline.period + pipeline.depth * pipeline.replicas[0]
        self._num_minibatches = min(wanted, len(whole))

    def close(self) -> None:
        """Free the workers' memory."""
        for worker in self._workers:
            worker.close()
        del self._workers, self._others

    def play(self, now: Callable[[], float]) -> dict[Key, float]:
        """Run the first minibatches; return mean seconds per instruction.

        A worker runs its list to the end, except in the first segment, where it may have to wait for a message to copy.
        """
        count, others = self._num_minibatches, self._others
        feed = _InRows(self._setup, "train", 0, count)
        others.feed = feed
        lists = programs(self._setup.pipeline, count)
        playing = {worker: deque(lists[index]) for index, worker in zip(self._indices, self._workers, strict=True)}
        found: dict[Key, list[Reading]] = defaultdict(list)
        clock = device_clock(self._setup.device, now)
        try:
            for worker in playing:
                worker.begin_training(feed, 0, count)
            while any(playing.values()):
                for worker, program in playing.items():
                    others.worker = worker
                    while program and others.can_hear(program[0]):
                        it = program.popleft()
                        _, seconds = clock(partial(worker.execute, it, others, others))
                        if it.op in _TIMED:
                            size = 0 if it.op is Op.UPDATE else feed.size(it.number)
                            found[Key(it.op, it.stage, size)].append(seconds)
        finally:
            feed.close()
        return {key: statistics.fmean(read() for read in each) for key, each in found.items()}


class _InRows(Feed):
    """A segment's data, in which all units of a row have the samples of its first one; few rows repeat in turn."""

    def row(self, unit: int) -> int:
        """Return the row of a unit."""
        pipeline = self._pipeline
        return unit // pipeline.block % ((_PERIODS + pipeline.depth) * pipeline.microbatches)

    def indices(self, unit: int) -> Sequence[int]:
        """Return a unit's samples."""
        return super().indices(self.row(unit) * self._pipeline.block)


class AloneCollectives:
    """The collectives of a worker that waits for no other: sums are its own gradients."""

    worker: Worker  # whose instruction is executed
    extensions = NOTHING

    def __init__(self) -> None:
        self._gradients: dict[int, list[torch.Tensor | None]] = {}  # by stage

    def on_gradient(self, stage: int) -> None:
        """Return None: gradients are contributed all at once."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store a round's gradients."""
        self._gradients[stage] = list(gradients)

    def wait(self, stage: int, replica: int, round_index: int) -> list[torch.Tensor | None]:
        """Return a round's gradients."""
        return self._gradients[stage]

    def gather(self, stage: int, kind: str) -> None:
        """Nothing is sharded."""

    def wait_gathered(self, stage: int) -> None:
        """Nothing is sharded."""

    def tied(self, group: int, round_index: int) -> list[torch.Tensor | None]:
        """Return a round's gradients of the worker's copies of a tie."""
        return self.worker.tied[group].gradients()

    def norm(self, round_index: int) -> torch.Tensor:
        """Return a norm that clips nothing away."""
        return torch.zeros(())


_Sent = dict[tuple[int, int, int], Any]  # activations by sending stage, receiving stage and row


class _Others(AloneCollectives):
    """Stand-in for all other workers: sends the first activations of the row, zero gradients, and no sums."""

    feed: _InRows

    def __init__(self, sent: _Sent) -> None:
        super().__init__()
        self._sent = sent

    def can_hear(self, it: Instruction) -> bool:
        """Return whether an instruction can run: whether the activation that it receives, if any, was sent before."""
        size = self.feed.size(it.number) if it.op is Op.RECEIVE_ACTIVATION else 0
        return size == 0 or (it.peer, it.stage, self.feed.row(it.number)) in self._sent

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Store a copy of activations, unless the row has some; gradients are ignored."""
        key = (source, target, self.feed.row(unit))
        if kind != GRADIENT and key not in self._sent:
            self._sent[key] = detached(cloned(values))

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return the activations that the other stage sent, or zero gradients for this one's."""
        row = self.feed.row(unit)
        if kind != GRADIENT:
            return detached(cloned(self._sent[source, target, row]))
        return zero_gradients(self._sent[target, source, row])

    def copied(self, kind: str, num_bytes: int) -> None:
        """Nothing is swapped."""


class _Ratios(NamedTuple):
    """Seconds in use over seconds in the profile, for a stage's layers."""

    forward: float
    backward: float
    weight: float


def _ratios(rows: Sequence[LayerProfile], profiled_in_situ: InSituTimes, stage: int, num_samples: int) -> _Ratios:
    def ratio(profiled_s: float, *ops: Op) -> float:
        found_s = sum(profiled_in_situ.get(Key(op, stage, num_samples), 0.0) for op in ops)
        return found_s / profiled_s if found_s > 0 and profiled_s > 0 else 1.0

    backward = ratio(sum(row.backward_s for row in rows), Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    is_split = Key(Op.BACKWARD_WEIGHT, stage, num_samples) in profiled_in_situ
    weight = ratio(sum(row.weight_s for row in rows), Op.BACKWARD_WEIGHT) if is_split else backward
    return _Ratios(ratio(sum(row.forward_s for row in rows), Op.FORWARD), backward, weight)


def _scaled(row: LayerProfile, ratios: _Ratios) -> LayerProfile:
    backward_s = row.backward_s * ratios.backward
    weight_s = min(row.weight_s * ratios.weight, backward_s)
    return replace(row, forward_s=row.forward_s * ratios.forward, backward_s=backward_s, weight_s=weight_s)


def _seconds(row: LayerProfile) -> float:
    return row.forward_s + row.backward_s


def _keeping(setup: Setup) -> Setup:
    """Return a setup without recomputation (its seconds are those of forwards), without swapping and shards."""
    stages = tuple(replace(stage, memory=(KEEP,) * len(stage.memory)) for stage in setup.plan.stages)
    return replace(
        setup, plan=replace(setup.plan, stages=stages), pipeline=replace(setup.pipeline, swaps=(), shard=NOT_SHARDED)
    )


def zero_gradients(values: Mapping[int, Any]) -> dict[int, list[torch.Tensor]]:
    """Return zero gradients for all tensors that get one."""
    return {layer: [*map(torch.zeros_like, differentiable(value))] for layer, value in values.items()}
