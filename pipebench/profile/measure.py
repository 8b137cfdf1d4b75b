"""The measured profile: every layer's forward, then its backward alone, timed on this machine.

A pass runs the layers in the order of training, so that caches and the allocator are in the state training leaves them
in; each layer gets the median over several passes, each with a minibatch of its own.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import nn

from pipebench.model.allocator import allocator_of
from pipebench.model.device import torch_settings
from pipebench.model.graph import LayerGraph
from pipebench.model.heap import keep_freed_blocks
from pipebench.model.loading import AHEAD, Source, onto_device
from pipebench.model.memory_format import channels_last, lay_out
from pipebench.model.optimizer import make_optimizer, state_bytes_per_byte
from pipebench.model.precision import lower
from pipebench.profile.clocks import Clock, Reading, device_clock
from pipebench.profile.devices import local_device_name
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.walk import idle_backward_s, walk
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from pipebench.zoo.registry import Dataset

# The first passes meet cold caches, CUDA's start-up and cuDNN's search for algorithms.
_WARM_UPS = 2
_OPTIMIZER_STEPS = 20
_Samples = Mapping[str, torch.Tensor]


def measured_profile(
    graph: LayerGraph,
    dataset: Dataset,
    sizes: Sequence[int],
    optimizer: OptimizerRecipe,
    device: torch.device,
    model_text: str,
    repeats: int = 11,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    engine: EngineRecipe,
) -> Profile:
    """Time every layer on a device of this machine, with the settings (threads, TF32, determinism) of `engine`.

    The model is copied: its parameters, buffers and gradients stay as they are, and so does the random state. GPU
    memory is released afterwards. `repeats` passes are timed at each of `sizes`, in samples; `on_progress` gets (layers
    profiled, layers to profile).

    Raises:
        ProfileError: a layer fails; names it.
    """
    keep_freed_blocks()  # as training does
    try:
        with torch_settings(engine):
            passes = _Passes(graph, dataset, device, repeats, engine.channels_last)
            return _measured(passes, sizes, optimizer, model_text, on_progress)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    passes: "_Passes",
    sizes: Sequence[int],
    optimizer: OptimizerRecipe,
    model_text: str,
    on_progress: Callable[[int, int], None] | None,
) -> Profile:
    graph, device = passes.graph, passes.device
    trained = [parameter for parameter in passes.root.parameters() if parameter.requires_grad]
    masters = [p for p in graph.root.parameters() if p.requires_grad] if graph.rounding else trained
    layers: dict[int, tuple[LayerProfile, ...]] = {}
    load_s, whole_step_s = {}, {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for index, size in enumerate(sizes):

            def report(fraction: float, index: int = index) -> None:
                if on_progress:
                    num_layers = len(graph.layers) + 1
                    on_progress(round((index + fraction) * num_layers), len(sizes) * num_layers)

            layers[size], whole_step_s[size] = passes.layers_and_step_s(size, report)
            load_s[size] = passes.load_s(size)
        update_s_per_byte, update_floor_s = _update_s(trained, masters, optimizer, passes.clock)
    profile = Profile(
        model=model_text,
        device=local_device_name(device),
        source="measured",
        note=f"median of {passes.repeats} passes after {_WARM_UPS} of warm-up, torch {torch.__version__}",
        layers=layers,
        update_s_per_byte=update_s_per_byte,
        update_floor_s=update_floor_s,
        load_s=load_s,
        whole_step_s=whole_step_s,
        state_bytes_per_byte=state_bytes_per_byte(optimizer),
    )
    ratios = ", ".join(f"{ratio:.3f} at {size} samples" for size, ratio in profile.sum_over_whole.items())
    return replace(profile, note=f"{profile.note}; sum over layers / whole step: {ratios}")


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of profiles that processes measured at the same time, each slowed down by the others.

    They are of one model, at the same sizes, on devices of one kind; at least one.
    """
    first = profiles[0]
    return replace(
        first,
        note=f"{first.note}; mean of {len(profiles)} processes that measured at the same time",
        layers={
            size: tuple(map(_mean_row, zip(*(each.layers[size] for each in profiles), strict=True)))
            for size in first.layers
        },
        update_s_per_byte=fmean(each.update_s_per_byte for each in profiles),
        update_floor_s=fmean(each.update_floor_s for each in profiles),
        load_s={size: fmean(each.load_s[size] for each in profiles) for size in first.load_s},
        whole_step_s={size: fmean(each.whole_step_s[size] for each in profiles) for size in first.whole_step_s},
    )


def _mean_row(rows: Sequence[LayerProfile]) -> LayerProfile:
    """Return a layer's row with mean seconds; nothing else differs between processes."""
    return replace(
        rows[0],
        forward_s=fmean(row.forward_s for row in rows),
        backward_s=fmean(row.backward_s for row in rows),
        weight_s=fmean(row.weight_s for row in rows),
    )


@dataclass(frozen=True)
class _Passes:
    """Timed passes through a copy of a model on a device, `repeats` for each size."""

    graph: LayerGraph
    dataset: Dataset
    device: torch.device
    repeats: int
    channels_last: bool = False

    @cached_property
    def root(self) -> nn.Module:
        """The copy, on the device and in the precision of training."""
        root = copy.deepcopy(self.graph.root).to(self.device).train()
        lower([root], self.graph.rounding)
        return lay_out(root) if self.channels_last else root

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        return device_clock(self.device)

    def layers_and_step_s(self, size: int, report: Callable[[float], None]) -> tuple[tuple[LayerProfile, ...], float]:
        """Return the medians over minibatches of `size` samples: every layer's costs, and seconds of a whole step.

        Passes and whole steps alternate, because the speed of a shared machine drifts by more than they differ.
        """
        passes, steps, allocator = [], [], allocator_of(self.device)
        for k in range(_WARM_UPS + self.repeats):
            samples = self._fetch(size, k, [*self.dataset.inputs, *self.dataset.targets])
            # Counting saved bytes takes time: only the first pass, which isn't timed, does.
            timed = walk(self.graph, self.root, self.dataset, samples, self.clock, count_saved=k == 0)
            if k == 0:
                counted = timed
            if k == 1 and allocator is not None:  # the first pass may try algorithms
                beside = walk(self.graph, self.root, self.dataset, samples, allocator.beside, count_saved=False)
                counted = tuple(map(_with_workspace, counted, beside))
            step_s = self._whole_step(samples)()
            if k >= _WARM_UPS:
                passes.append(timed)
                steps.append(step_s)
            report((k + 1) / (_WARM_UPS + self.repeats))
        entry_s = _autograd_entry_s(next(iter(samples.values())).device, self.clock)
        layers = (_median(rows, entry_s) for rows in zip(*passes, strict=True))
        pairs = zip(counted, layers, strict=True)
        return tuple(first.with_times_of(row) for first, row in pairs), statistics.median(steps)

    def load_s(self, size: int) -> float:
        """Return the seconds per minibatch at which inputs reach the device, by the path that training takes.

        After the passes, so that the allocator has the memory that it reuses; those fetched ahead aren't counted.
        Loader processes aren't started: all of them, working for one worker, are taken to share the work evenly.
        """
        source = Source(self.dataset, "train", self.dataset.inputs, self.device)
        tasks = ((self._indices(size, k), 0) for k in range(1 + AHEAD + self.repeats))
        arrived_s = []
        with closing(source.minibatches(tasks, 0)) as minibatches:
            for minibatch in minibatches:
                for value in minibatch.values():
                    onto_device(value, self.device)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                arrived_s.append(time.perf_counter())
        each_s = statistics.median(end - start for start, end in pairwise(arrived_s[AHEAD:]))
        return each_s / max(1, self.dataset.loader_processes)

    def _indices(self, size: int, k: int) -> list[int]:
        return [i % self.dataset.num_train for i in range(k * size, (k + 1) * size)]

    def _fetch(self, size: int, k: int, fields: Sequence[str]) -> _Samples:
        """Return the k-th minibatch of the training samples, on the device."""
        fetched = Source(self.dataset, "train", fields, self.device).fetch((self._indices(size, k), 0))
        there = {name: onto_device(value, self.device) for name, value in fetched.items()}
        if self.channels_last:
            there |= {name: channels_last(there[name]) for name in self.dataset.inputs if name in there}
        return there

    def _whole_step(self, samples: _Samples) -> Reading:
        """Run one forward and backward of the whole model, as a user would write it."""
        parameters = [parameter for parameter in self.root.parameters() if parameter.requires_grad]

        def step() -> Any:
            output = self.root(*(samples[name] for name in self.dataset.inputs))
            loss = self.dataset.loss(output, {name: samples[name] for name in self.dataset.targets})
            return torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()

        return self.clock(step)[1]


def _with_workspace(row: LayerProfile, beside: LayerProfile) -> LayerProfile:
    """Return a row with its workspace, from one of a pass whose clock told bytes."""
    return replace(row, workspace_bytes=round(max(beside.forward_s, beside.backward_s)))


def _median(rows: Sequence[LayerProfile], entry_s: float) -> LayerProfile:
    backward_s = max(0.0, statistics.median(row.backward_s for row in rows) - entry_s)
    weight_s = max(0.0, statistics.median(row.weight_s for row in rows) - entry_s)
    return replace(
        rows[0],
        forward_s=statistics.median(row.forward_s for row in rows),
        backward_s=backward_s,
        weight_s=min(weight_s, backward_s),
    )


def _autograd_entry_s(device: torch.device, clock: Clock) -> float:
    """Return the seconds of entering and leaving autograd: once per step in training, once per layer in a pass."""
    readings = [idle_backward_s(device, clock) for _ in range(_WARM_UPS + 50)]
    return statistics.median(reading() for reading in readings[_WARM_UPS:])


def _update_s(
    trained: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], recipe: OptimizerRecipe, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of one optimizer step per byte of parameters, and those of a step on almost none.

    The optimizer steps on `masters`, which are `trained` itself or, in mixed precision, fp32 copies on any device; the
    step then includes the conversion of gradients and parameters.
    """
    if not trained:
        return 0.0, 0.0
    # Of as many dimensions as a parameter: not every optimizer takes one.
    one = [torch.zeros([1] * trained[0].dim(), dtype=trained[0].dtype, device=trained[0].device)]
    floor_s = _step_s(one, one if masters is trained else [one[0].to(masters[0].dtype)], recipe, clock)
    whole_s = _step_s(trained, masters, recipe, clock)
    return max(0.0, whole_s - floor_s) / sum(parameter.nbytes for parameter in trained), floor_s


def _step_s(
    trained: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], recipe: OptimizerRecipe, clock: Clock
) -> float:
    device = trained[0].device
    stepped = [torch.zeros_like(parameter, device=device).requires_grad_() for parameter in masters]
    given = [torch.full_like(parameter, 1e-3) for parameter in trained]
    rounded = [torch.zeros_like(parameter) for parameter in trained]
    optimizer = make_optimizer(recipe, stepped)

    def widen() -> None:
        for parameter, gradient in zip(stepped, given, strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    def step_and_round() -> None:
        widen()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(rounded, stepped)

    widen()
    step = optimizer.step if masters is trained else step_and_round
    readings = [clock(step)[1] for _ in range(_WARM_UPS + _OPTIMIZER_STEPS)]
    return statistics.median(reading() for reading in readings[_WARM_UPS:])
