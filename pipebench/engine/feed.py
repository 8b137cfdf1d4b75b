"""The data of a segment of training, or of an evaluation: each unit's samples, inputs and targets.

Inputs are prefetched while stages compute (`model/loading.py`), which changes no result.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from itertools import dropwhile
from typing import NamedTuple

import torch

from pipebench.engine.setup import Setup
from pipebench.engine.streams import StreamSlot
from pipebench.model.loading import Loaders, Source, Task, onto_device
from pipebench.model.sampling import microbatch_sizes, mix, name_hash
from pipebench.schedule.programs import forward_units
from pipebench.simulate.costs import shared_loaders

_SIZES_CACHED = 1024  # more than there are units in flight


class Feed:
    """The data of one segment of training, or of one evaluation.

    Args:
        setup: what is run.
        split: `train` or `eval`.
        first: minibatch of unit 0, numbered since the run's start.
        num_minibatches: of the segment or evaluation.
        loaders: loader processes that outlive it; None: it starts its own, and ends them.
    """

    def __init__(
        self, setup: Setup, split: str, first: int, num_minibatches: int, loaders: Loaders | None = None
    ) -> None:
        self.split = split
        self._setup = setup
        self._first = first
        self._num_minibatches = num_minibatches
        self._trains = split == "train"
        self._pipeline = setup.pipeline if self._trains else setup.evaluation.pipeline
        self._sampler = setup.sampler if self._trains else setup.held_out
        self._fields = dict(zip(setup.graph.inputs, setup.dataset.inputs, strict=True))
        self._own_loaders = Loaders(setup.dataset, setup.device)
        self._loaders = loaders or self._own_loaders
        self._ahead: dict[tuple[int, int], _Ahead] = {}  # by stage and worker
        self._loaded: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # targets by worker and unit
        self._parts = setup.pipeline.microbatches if self._trains else 1
        # Only of a data set that weighs targets: weights of units whose targets were asked for, and of minibatches.
        self._weights: dict[int, float] = {}
        self._weighed: list[float] = []
        self._weighing = self._weigh()
        # A unit's number of samples, cached since every instruction reads it. A minibatch with fewer samples than
        # microbatches has units of 0 samples.
        self.size = lru_cache(maxsize=_SIZES_CACHED)(self._size)

    def minibatch(self, unit: int) -> tuple[int, int]:
        """Return a unit's minibatch, numbered since the run's start, and its microbatch, 0 in evaluations."""
        minibatch, microbatch = self._pipeline.minibatch(unit) if self._trains else (unit, 0)
        return self._first + minibatch, microbatch

    def indices(self, unit: int) -> Sequence[int]:
        """Return a unit's samples."""
        minibatch, microbatch = self.minibatch(unit)
        indices, sizes = self._sampler.indices(minibatch), self._sizes(minibatch)
        start = sum(sizes[:microbatch])
        return indices[start : start + sizes[microbatch]]

    def weight(self, unit: int) -> float:
        """Return a unit's weight in the mean loss; called once, after `targets` if the data set weighs these."""
        if self._setup.dataset.weighs_targets:
            return self._weights.pop(unit)
        return self._setup.dataset.weight(self.split, self.indices(unit))

    def round_weight(self, minibatches: range) -> float:
        """Return the weight of minibatches of the segment, all workers', in the mean loss; 1 if they have none."""
        dataset = self._setup.dataset
        if not dataset.weighs_targets:
            indices = (self._sampler.indices(self._first + k) for k in minibatches)
            return sum(dataset.weight(self.split, each) for each in indices) or 1.0
        while minibatches and minibatches[-1] >= len(self._weighed):
            self._weighed.append(next(self._weighing))
        return sum(self._weighed[k] for k in minibatches) or 1.0

    def place(self, unit: int) -> StreamSlot:
        """Return the stream whose state stateful modules continue in a unit."""
        minibatch, microbatch = self.minibatch(unit)
        stream = self._sampler.stream(minibatch)
        return StreamSlot(self.split, stream.number, microbatch, stream.starts)

    def inputs(self, stage: int, worker: int, unit: int, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the named model inputs of a unit.

        A stage of a worker requests its units in the order of their forwards, without gaps, since they are prefetched
        in this order. If the data set can't fetch targets apart from inputs, they are stored for `targets`.
        """
        inputs = [self._fields[name] for name in names]
        targets = self._setup.dataset.targets if stage == self._reads_targets else []
        fields = [*dict.fromkeys((*inputs, *targets))]
        if not fields or self.size(unit) == 0:
            return []
        found, fetched = next(self._fetching(stage, worker, fields, unit))
        if found != unit and self._setup.repartitions:  # layers that read inputs have moved here
            self._ahead.pop((stage, worker)).units.close()
            found, fetched = next(self._fetching(stage, worker, fields, unit))
        assert found == unit, f"stage {stage} of worker {worker} asked for unit {unit}, next is {found}"
        if targets:
            self._loaded[worker, unit] = {name: fetched[name] for name in targets}
        return [onto_device(fetched[field], self._setup.device) for field in inputs]

    @cached_property
    def _reads_targets(self) -> int | None:
        """The first stage that reads samples where the loss is computed, if targets aren't apart from the inputs."""
        if self._setup.dataset.targets_apart:
            return None
        last = self._pipeline.num_stages - 1
        return next((stage for stage in self._pipeline.loads if self._pipeline.is_local(stage, last)), None)

    def _fetching(self, stage: int, worker: int, fields: list[str], unit: int) -> "_Fetched":
        """Return the prefetched units of a worker's stage, from `unit` on if the fields are others than before."""
        ahead = self._ahead.get((stage, worker))
        if ahead is None or ahead.fields != fields:
            if ahead is not None:
                ahead.units.close()
            ahead = self._ahead[stage, worker] = _Ahead(fields, self._fetch_ahead(stage, worker, fields, unit))
        return ahead.units

    def targets(self, worker: int, unit: int) -> dict[str, torch.Tensor]:
        """Return what the loss of a unit needs besides the model's output; called once."""
        dataset, fetched = self._setup.dataset, self._loaded.pop((worker, unit), None)
        if fetched is None:
            fetched = self._task(unit).fetch(dataset, self.split, dataset.targets)
        if dataset.weighs_targets:
            self._weights[unit] = dataset.weigh(fetched)
        return {name: onto_device(value, self._setup.device) for name, value in fetched.items()}

    def close(self) -> None:
        """End prefetching."""
        for ahead in self._ahead.values():
            ahead.units.close()
        self._weighing.close()
        self._own_loaders.close()

    def _fetch_ahead(self, stage: int, worker: int, fields: Sequence[str], first: int) -> "_Fetched":
        """Yield a stage's units from `first` on, in the order of their forwards, with their fields."""
        source = Source(self._setup.dataset, self.split, fields, self._setup.device)
        tasks = map(self._task, self._units(stage, worker, first))
        processes = self._loaders.of((stage, worker), self._num_processes)
        with closing(source.minibatches(tasks, processes)) as minibatches:
            yield from zip(self._units(stage, worker, first), minibatches, strict=True)

    def _weigh(self) -> Generator[float, None, None]:
        """Yield the weights of the segment's minibatches, whose targets are read for it, by a loader process if any."""
        dataset, pipeline = self._setup.dataset, self._pipeline
        source = Source(dataset, self.split, dataset.targets, self._setup.device)
        units = [[unit for unit in pipeline.units(k) if self.size(unit) > 0] for k in range(self._num_minibatches)]
        tasks = (self._task(unit) for each in units for unit in each)
        processes = self._loaders.of("weights", min(1, dataset.loader_processes))
        with closing(source.minibatches(tasks, processes)) as fetched:
            for each in units:
                yield sum(dataset.weigh(next(fetched)) for _ in each)

    @property
    def _num_processes(self) -> int:
        """Loader processes per worker that reads inputs: those of the data set, divided among these workers."""
        pipeline, total = self._pipeline, self._setup.dataset.loader_processes
        return shared_loaders(total, sum(pipeline.replicas[stage] for stage in pipeline.loads))

    def _units(self, stage: int, worker: int, first: int) -> Iterator[int]:
        """Yield a stage's non-empty units from `first` on, in the order of their forwards."""
        pipeline, count = self._pipeline, self._num_minibatches
        if self._trains:
            units: Iterable[int] = forward_units(pipeline, stage, worker, count)
        else:
            units = pipeline.own_units(stage, worker, range(count))
        return (unit for unit in dropwhile(first.__ne__, units) if self.size(unit) > 0)

    def _task(self, unit: int) -> Task:
        minibatch, _ = self.minibatch(unit)
        draw = mix(self._setup.seed, name_hash("augmentation"), minibatch)
        return Task(list(self.indices(unit)), draw, minibatch // self._sampler.minibatches_per_epoch)

    def _size(self, unit: int) -> int:
        minibatch, microbatch = self.minibatch(unit)
        return self._sizes(minibatch)[microbatch]

    def _sizes(self, minibatch: int) -> list[int]:
        return microbatch_sizes(self._sampler.size(minibatch), self._parts)


_Fetched = Generator[tuple[int, dict[str, torch.Tensor]], None, None]


class _Ahead(NamedTuple):
    """The fields that a worker's stage reads, and its prefetched units."""

    fields: list[str]
    units: _Fetched
