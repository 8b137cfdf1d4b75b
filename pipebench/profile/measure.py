"""The measured profile: every layer's forward, then its backward alone, timed on this machine.

A pass runs the layers in the order of training, so that caches and the allocator are in the state in which training
leaves them. Each layer gets the median over several passes, each with another minibatch; passes go on until the medians
are known well enough. The sizes take turns, so that drift of the machine's speed doesn't favour one of them. A model
that the device can't hold as a whole, which is what pipelines are for, is measured in pieces.
"""

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import accumulate, count, pairwise
from statistics import fmean
from typing import Any

import torch
from torch import nn

from pipebench import formats
from pipebench.errors import is_out_of_memory
from pipebench.model.allocator import allocator_of, release_copies
from pipebench.model.copies import copied
from pipebench.model.device import torch_settings
from pipebench.model.graph import LayerGraph
from pipebench.model.heap import keep_freed_blocks
from pipebench.model.loading import AHEAD, Source, Task, onto_device
from pipebench.model.memory_format import channels_last, lay_out
from pipebench.model.optimizer import make_optimizer, state_bytes_per_byte
from pipebench.model.precision import lower
from pipebench.profile.clocks import Clock, Reading, device_clock
from pipebench.profile.devices import local_device_name
from pipebench.profile.enough import StopRule, uncertainty
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.pieces import Pieces
from pipebench.profile.request import ProfileRequest
from pipebench.profile.walk import idle_backward_s, walk
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from pipebench.zoo.registry import Dataset

_FAR = 2.0  # a sum over layers that is as many times larger or smaller than a whole step is doubtful
_WARM_UPS = 2  # the first passes meet cold caches, CUDA's start-up and cuDNN's search for algorithms
_RULE = StopRule()
# An optimizer's step is timed on the first parameters, of so many bytes: more than caches hold. In the rest of a large
# model a byte takes as long, and its gradients and state would need a multiple of its memory.
_STEPPED_BYTES = 1 << 28
_REPORT_EVERY_S = 0.1  # so seldom that reports don't slow small layers down
OnProgress = Callable[[str], None]  # takes what is being done, in words
_Samples = Mapping[str, torch.Tensor]


def measured_profile(
    request: ProfileRequest,
    device: torch.device,
    rule: StopRule = _RULE,
    on_progress: OnProgress | None = None,
    *,
    engine: EngineRecipe,
    whole_steps: bool = True,
) -> Profile:
    """Time every layer of a copy of the model on a device of this machine; the random state is restored.

    If the device can't hold the whole model, it is measured in 2 pieces, or 4, and so on.

    Args:
        request: the model, its data and the sizes.
        device: where to measure.
        rule: says for each size when passes are enough.
        on_progress: gets what is measured, in words.
        engine: the settings (threads, TF32, determinism) to measure with.
        whole_steps: whether to time whole steps, too, to compare the sum over the layers with; not of pieces.

    Raises:
        ProfileError: a layer fails, or the device can't hold it; names it.
    """
    keep_freed_blocks()  # as training does
    report = on_progress or (lambda work: None)
    with torch_settings(engine):
        for num_pieces in (1 << k for k in count()):
            passes = _Passes(request, device, rule, report, engine, whole_steps, num_pieces)
            try:
                return _measured(passes)
            except Exception as error:
                # Keep no reference to the error: its frames hold the tensors that have filled the device.
                if num_pieces > len(request.graph.layers) or not _has_filled_device(error.__cause__ or error):
                    raise
            finally:
                del passes
                release_copies(device, request.graph.root)
            report(f"measuring in {2 * num_pieces} pieces, larger ones are too much for {device}")
    raise AssertionError("it ends with pieces of one layer each")


def _has_filled_device(error: BaseException) -> bool:
    """Return whether torch has run out of memory; anything else that has wouldn't need less in smaller pieces."""
    return isinstance(error, RuntimeError) and is_out_of_memory(error)


def _measured(passes: "_Passes") -> Profile:
    """Return the profile of one number of pieces; the passes come first, so that the allocator has memory to reuse."""
    device, (_, dataset, sizes, optimizer, model) = passes.device, passes.request
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        found = passes.at(sizes)
        load_s = {size: passes.load_s(size) for size in sizes}
        entry_s = _median_s(partial(idle_backward_s, device, passes.clock), passes.rule)
        update_s_per_byte, update_floor_s = _update_s(*_stepped(passes), optimizer, passes)
    allocator = allocator_of(device)
    pieces = f"in {passes.num_pieces} pieces, as the device can't hold the whole, " if passes.pieces else ""
    profile = Profile(
        model=model,
        device=local_device_name(device),
        source="measured",
        # With the date, since the cache may return the profile much later.
        note=f"medians of {_counted(found)} after warm-up, {pieces}torch {torch.__version__}, "
        f"on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC",
        layers={size: each.layers(entry_s) for size, each in found.items()},
        update_s_per_byte=update_s_per_byte,
        update_floor_s=update_floor_s,
        load_s=load_s,
        loaders=dataset.loader_processes,
        device_bytes=0 if allocator is None else allocator.total_bytes,
        whole_step_s={size: statistics.median(each.steps_s) for size, each in found.items() if each.steps_s},
        state_bytes_per_byte=state_bytes_per_byte(optimizer),
    )
    compared = note_on_sums(profile.sum_over_whole)
    return replace(profile, note=f"{profile.note}; {compared}") if compared else profile


def note_on_sums(sum_over_whole: Mapping[int, float]) -> str:
    """Return a note on the ratios of `Profile.sum_over_whole`: the ratios, which are far from 1, and likely causes.

    >>> note_on_sums({8: 1.02, 64: 1.466})
    'sum over layers / whole step: 1.020 at 8 samples, 1.466 at 64 samples'
    """
    ratios = ", ".join(f"{ratio:.3f} at {formats.num_samples(size)}" for size, ratio in sum_over_whole.items())
    far = ", ".join(str(size) for size, ratio in sum_over_whole.items() if not 1 / _FAR <= ratio <= _FAR)
    causes = "other work on the machine slowed one of the two down, or layers take microseconds"
    doubt = f"; not near 1 at {far}: {causes}; engine.timing=anew measures again" if far else ""
    return f"sum over layers / whole step: {ratios}{doubt}" if ratios else ""


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of profiles that several processes measured at the same time, slowing each other down.

    `profiles`, at least one, are of one model, at the same sizes, on devices of one kind.
    """
    first = profiles[0]
    # A device whose memory other programs use may not hold the whole model; it has timed no whole steps then.
    whole_sizes = [size for size in first.whole_step_s if all(size in each.whole_step_s for each in profiles)]
    return replace(
        first,
        note=f"{first.note}; mean of {len(profiles)} processes that measured at the same time",
        layers={
            size: tuple(
                rows[0].with_times_over(rows, fmean)
                for rows in zip(*(each.layers[size] for each in profiles), strict=True)
            )
            for size in first.layers
        },
        update_s_per_byte=fmean(each.update_s_per_byte for each in profiles),
        update_floor_s=fmean(each.update_floor_s for each in profiles),
        load_s={size: fmean(each.load_s[size] for each in profiles) for size in first.load_s},
        device_bytes=min(each.device_bytes for each in profiles),
        whole_step_s={size: fmean(each.whole_step_s[size] for each in profiles) for size in whole_sizes},
    )


@dataclass
class _AtSize:
    """What is measured at one number of samples."""

    counted: tuple[LayerProfile, ...] = ()  # the rows of the first pass, for their bytes
    passes: list[tuple[LayerProfile, ...]] = field(default_factory=list)  # the rows of the timed passes
    steps_s: list[float] = field(default_factory=list)  # seconds of whole steps
    warm_up_s: float = 0.0  # seconds spent on warm-up
    spent_s: float = 0.0  # seconds spent after it

    @property
    def series(self) -> list[list[float]]:
        """The seconds of every layer's forward and backward, by pass."""
        rows = [*zip(*self.passes, strict=True)]
        return [[getattr(row, part) for row in each] for each in rows for part in ("forward_s", "backward_s")]

    def is_enough(self, rule: StopRule) -> bool:
        """Return whether the layers' medians are known as `rule` wants them."""
        return bool(self.passes) and rule.is_met(self.series, self.spent_s)

    def layers(self, entry_s: float) -> tuple[LayerProfile, ...]:
        """Return the layers with their median times; `entry_s` is subtracted from backwards, see `idle_backward_s`."""
        pairs = zip(self.counted, zip(*self.passes, strict=True), strict=True)
        medians = (counted.with_times_over(rows, statistics.median) for counted, rows in pairs)
        return tuple(_without_entry(row, entry_s) for row in medians)


def _counted(found: Mapping[int, _AtSize]) -> str:
    """Return, in words, the number of passes at every size and how precisely the sum over the layers is known."""
    parts = []
    for size, each in found.items():
        share = uncertainty(each.series)
        known = f"+-{share:.1%}" if math.isfinite(share) else "too few to say how precise"
        count = len(each.passes)
        parts.append(f"{count} pass{'es' * (count > 1)} at {formats.num_samples(size)} ({known})")
    return ", ".join(parts)


@dataclass(frozen=True)
class _Passes:
    """Timed passes through a copy of a model on a device, as many at each size as `rule` requires."""

    request: ProfileRequest
    device: torch.device
    rule: StopRule
    on_progress: OnProgress
    engine: EngineRecipe
    whole_steps: bool  # whether whole steps are timed as well, if there is one piece
    num_pieces: int

    @property
    def graph(self) -> LayerGraph:
        """The model."""
        return self.request.graph

    @property
    def dataset(self) -> Dataset:
        """The model's data."""
        return self.request.dataset

    @cached_property
    def root(self) -> nn.Module:
        """The copy, in the precision of training; on the device, unless the model is in pieces."""
        root = copied(self.graph.root).train()
        lower([root if self.num_pieces > 1 else root.to(self.device)], self.graph.rounding)
        return lay_out(root) if self.engine.channels_last else root

    @cached_property
    def pieces(self) -> Pieces | None:
        """The pieces that take turns on the device; None if it holds the whole model."""
        return Pieces(self.graph, self.root, self.device, self.num_pieces) if self.num_pieces > 1 else None

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        return device_clock(self.device)

    def at(self, sizes: Sequence[int]) -> dict[int, _AtSize]:
        """Return what is measured at every size.

        Passes and whole steps alternate, because the speed of a shared machine drifts by more than they differ.
        """
        found = {size: _AtSize() for size in sizes}
        for k in count():
            unfinished = [size for size, each in found.items() if not each.is_enough(self.rule)]
            if not unfinished:
                return found
            for size in unfinished:
                self._once(k, size, found[size])
        raise AssertionError("passes go on until all are enough")

    def _once(self, k: int, size: int, found: _AtSize) -> None:
        """Make the k-th pass at a size; the first ones warm up."""
        report = self._reporter(size)
        samples = self._fetch(size, k, [*self.dataset.inputs, *self.dataset.targets])
        start_s, allocator = time.perf_counter(), allocator_of(self.device)
        # Counting saved bytes takes time: only the first pass does, whose times aren't used.
        timed = self._walk(samples, self.clock, report if k > 0 else None)
        if k == 0:
            found.counted = timed
        if k == 1 and allocator is not None:  # not the first pass, in which cuDNN may try algorithms
            beside = self._walk(samples, allocator.beside, report)
            found.counted = tuple(map(_with_workspace, found.counted, beside))
        step_s = [self._whole_step(samples)()] if self.whole_steps and self.num_pieces == 1 else []
        spent_s = time.perf_counter() - start_s
        if k == 0 or (k < _WARM_UPS and found.warm_up_s < self.rule.most_s):
            found.warm_up_s += spent_s
        else:
            found.passes.append(timed)
            found.steps_s += step_s
            found.spent_s += spent_s

    def _walk(
        self, samples: _Samples, clock: Clock, on_layer: Callable[[int], None] | None
    ) -> tuple[LayerProfile, ...]:
        return walk(self.graph, self.pieces or self.root, self.dataset, samples, clock, on_layer)

    def _reporter(self, size: int) -> Callable[[int], None]:
        """Return a function that takes a layer's index and reports that it is measured, if the last report is old."""
        due_s, num_layers = 0.0, len(self.graph.layers) + 1

        def report(index: int) -> None:
            nonlocal due_s
            now_s = time.perf_counter()
            if now_s >= due_s:
                due_s = now_s + _REPORT_EVERY_S
                self.on_progress(f"measuring layer {index + 1} of {num_layers} at {formats.num_samples(size)}")

        report(0)
        return report

    def load_s(self, size: int) -> float:
        """Return the seconds per minibatch at which inputs reach the device, by the path that training takes.

        It is measured after the passes, when the allocator has memory to reuse. The first minibatches, which are
        fetched ahead, aren't counted. No loader processes are started: they are assumed to share the work evenly.
        """
        source = Source(self.dataset, "train", self.dataset.inputs, self.device)
        tasks = (Task(self._indices(size, k)) for k in count())
        arrived_s: list[float] = []
        each_s: list[float] = []
        with closing(source.minibatches(tasks)) as minibatches:
            for minibatch in minibatches:
                for value in minibatch.values():
                    onto_device(value, self.device)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                arrived_s.append(time.perf_counter())
                each_s = [end - start for start, end in pairwise(arrived_s[AHEAD:])]
                if each_s and self.rule.is_met([each_s], arrived_s[-1] - arrived_s[AHEAD]):
                    break
        return statistics.median(each_s) / max(1, self.dataset.loader_processes)

    def _indices(self, size: int, k: int) -> list[int]:
        return [i % self.dataset.num_train for i in range(k * size, (k + 1) * size)]

    def _fetch(self, size: int, k: int, fields: Sequence[str]) -> _Samples:
        """Return the k-th minibatch of the training samples, on the device."""
        fetched = Source(self.dataset, "train", fields, self.device).fetch(Task(self._indices(size, k)))
        samples = {name: onto_device(value, self.device) for name, value in fetched.items()}
        if self.engine.channels_last:
            samples |= {name: channels_last(samples[name]) for name in self.dataset.inputs if name in samples}
        return samples

    def _whole_step(self, samples: _Samples) -> Reading:
        """Time one forward and backward of the whole model, written as a user would."""
        parameters = [parameter for parameter in self.root.parameters() if parameter.requires_grad]

        def step() -> Any:
            output = self.root(*(samples[name] for name in self.dataset.inputs))
            loss = self.dataset.loss(output, {name: samples[name] for name in self.dataset.targets})
            return torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()

        return self.clock(step)[1]


def _with_workspace(row: LayerProfile, beside: LayerProfile) -> LayerProfile:
    """Return a row with its workspace; `beside` is the layer's row of a pass whose clock measured bytes."""
    return replace(row, workspace_bytes=round(max(beside.forward_s, beside.backward_s)))


def _without_entry(row: LayerProfile, entry_s: float) -> LayerProfile:
    backward_s = max(0.0, row.backward_s - entry_s)
    return replace(row, backward_s=backward_s, weight_s=min(backward_s, max(0.0, row.weight_s - entry_s)))


def _median_s(measure: Callable[[], Reading], rule: StopRule) -> float:
    """Return the median of a measurement's readings, as many as `rule` requires, after a warm-up.

    Several measurements are begun before they are read, since reading waits for a GPU.
    """
    for _ in range(_WARM_UPS):
        measure()()
    found: list[float] = []
    start_s = time.perf_counter()
    while not found or not rule.is_met([found], time.perf_counter() - start_s):
        readings = [measure() for _ in range(rule.few)]
        found += [reading() for reading in readings]
    return statistics.median(found)


def _stepped(passes: _Passes) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return parameters on the device to time an optimizer's step on, and their masters in mixed precision.

    Without masters both are the same list.
    """
    trained: list[torch.Tensor] = [each for each in passes.root.parameters() if each.requires_grad]
    first_bytes = [*accumulate(each.nbytes for each in trained)]
    stepped_bytes = min(_STEPPED_BYTES, first_bytes[-1] // passes.num_pieces) if trained else 0
    trained = trained[: 1 + bisect_left(first_bytes, stepped_bytes)]
    if passes.pieces:
        trained = [each.detach().to(passes.device).requires_grad_() for each in trained]
    whole: list[torch.Tensor] = [each for each in passes.graph.root.parameters() if each.requires_grad]
    masters = whole[: len(trained)] if passes.graph.rounding else trained
    return trained, masters


def _update_s(
    trained: list[torch.Tensor], masters: list[torch.Tensor], recipe: OptimizerRecipe, passes: _Passes
) -> tuple[float, float]:
    """Return the seconds of one optimizer step per byte of parameters, and the seconds of a step on a single number.

    The optimizer steps on `trained`, whose values change, or in mixed precision on copies of `masters`, which are fp32
    and on any device. Then the step includes the conversions of gradients and parameters.
    """
    if not trained:
        return 0.0, 0.0
    # With as many dimensions as a parameter, since some optimizers refuse tensors of one dimension.
    one = [torch.zeros([1] * trained[0].dim(), dtype=trained[0].dtype, device=trained[0].device).requires_grad_()]
    floor_s = _step_s(one, one if masters is trained else [one[0].to(masters[0].dtype)], recipe, passes)
    whole_s = _step_s(trained, masters, recipe, passes)
    return max(0.0, whole_s - floor_s) / sum(parameter.nbytes for parameter in trained), floor_s


def _step_s(
    trained: list[torch.Tensor], masters: list[torch.Tensor], recipe: OptimizerRecipe, passes: _Passes
) -> float:
    """Return the seconds of one optimizer step, in mixed precision with the conversions before and after it."""
    is_mixed, device = masters is not trained, trained[0].device
    stepped = [torch.zeros_like(each, device=device).requires_grad_() for each in masters] if is_mixed else trained
    given = [torch.full_like(parameter, 1e-3) for parameter in trained]
    optimizer = make_optimizer(recipe, stepped)

    def widen() -> None:
        for parameter, gradient in zip(stepped, given, strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    def step_and_round() -> None:
        widen()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, stepped)

    widen()
    step = step_and_round if is_mixed else optimizer.step
    return _median_s(lambda: passes.clock(step)[1], passes.rule)
