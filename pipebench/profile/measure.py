"""The measured profile: every layer's forward, then its backward alone, timed on the device we have.

A pass runs the layers in the order of training, so that caches and the allocator are in the state training leaves them
in; each layer gets the median over several passes, each with a minibatch of its own.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipebench.model.device import torch_settings
from pipebench.model.graph import LayerGraph
from pipebench.model.optimizer import make_optimizer, state_bytes_per_byte
from pipebench.model.precision import lower
from pipebench.profile.devices import local_device_name
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.walk import Clock, Reading, idle_backward_s, walk
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from zoo.registry import Dataset

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
    """Time every layer on a device of this machine, with the settings (threads, TF32, determinism) of a run.

    The model is copied: its parameters, buffers and gradients stay as they are, and so does the random state. GPU
    memory that it took is given back to the device: this process, or others, may need it.

    Args:
        graph: the layer graph.
        dataset: gives minibatches and the loss.
        sizes: numbers of samples that travel.
        optimizer: what updates the parameters.
        device: where to measure.
        model_text: readable description of the model.
        repeats: timed passes per size.
        on_progress: told of (layers profiled, layers to profile).
        engine: the settings.

    Raises:
        ProfileError: a layer fails; names it.
    """
    try:
        with torch_settings(engine):
            return _measured(graph, dataset, sizes, optimizer, device, model_text, repeats, on_progress)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    graph: LayerGraph,
    dataset: Dataset,
    sizes: Sequence[int],
    optimizer: OptimizerRecipe,
    device: torch.device,
    model_text: str,
    repeats: int,
    on_progress: Callable[[int, int], None] | None,
) -> Profile:
    clock = _cuda_clock if device.type == "cuda" else _cpu_clock
    root = copy.deepcopy(graph.root).to(device).train()
    lower([root], graph.rounding)
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    masters = [p for p in graph.root.parameters() if p.requires_grad] if graph.rounding else trained
    layers: dict[int, tuple[LayerProfile, ...]] = {}
    load_s, whole_step_s = {}, {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for index, size in enumerate(sizes):

            def report(fraction: float, index: int = index) -> None:
                if on_progress:
                    num_layers = len(graph.layers) + 1
                    on_progress(round((index + fraction) * num_layers), len(sizes) * num_layers)

            load_s[size] = _load_s(dataset, size, device, repeats)
            minibatch = partial(_fetch, dataset, size, device, [*dataset.inputs, *dataset.targets])
            layers[size], whole_step_s[size] = _layers_and_step(graph, root, dataset, minibatch, clock, repeats, report)
        update_s_per_byte, update_floor_s = _update_s(trained, masters, optimizer, clock)
    profile = Profile(
        model=model_text,
        device=local_device_name(device),
        source="measured",
        note=f"median of {repeats} passes after {_WARM_UPS} of warm-up, torch {torch.__version__}",
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
    """Return the mean of what several processes measured at the same time: each is as slow as the others make it.

    Args:
        profiles: of one model, at the same sizes, on devices of one kind; at least one.
    """
    first = profiles[0]
    layers = {
        size: tuple(map(_mean_row, zip(*(profile.layers[size] for profile in profiles), strict=True)))
        for size in first.layers
    }

    def mean(of: Callable[[Profile], float]) -> float:
        return statistics.fmean(of(profile) for profile in profiles)

    return replace(
        first,
        note=f"{first.note}; mean of {len(profiles)} processes that measured at the same time",
        layers=layers,
        update_s_per_byte=mean(lambda profile: profile.update_s_per_byte),
        update_floor_s=mean(lambda profile: profile.update_floor_s),
        load_s={size: mean(lambda profile, size=size: profile.load_s[size]) for size in first.load_s},  # type: ignore[misc]
        whole_step_s={
            size: mean(lambda profile, size=size: profile.whole_step_s[size])  # type: ignore[misc]
            for size in first.whole_step_s
        },
    )


def _mean_row(rows: Sequence[LayerProfile]) -> LayerProfile:
    """Return a layer's row: durations differ from process to process, nothing else."""
    return replace(
        rows[0],
        forward_s=statistics.fmean(row.forward_s for row in rows),
        backward_s=statistics.fmean(row.backward_s for row in rows),
        weight_s=statistics.fmean(row.weight_s for row in rows),
    )


def _fetch(dataset: Dataset, size: int, device: torch.device, fields: Sequence[str], k: int) -> _Samples:
    """Return the k-th minibatch of the training samples, on the device."""
    indices = [i % dataset.num_train for i in range(k * size, (k + 1) * size)]
    return {name: value.to(device) for name, value in dataset.fetch("train", indices, fields).items()}


def _layers_and_step(
    graph: LayerGraph,
    root: nn.Module,
    dataset: Dataset,
    minibatch: Callable[[int], _Samples],
    clock: Clock,
    repeats: int,
    report: Callable[[float], None],
) -> tuple[tuple[LayerProfile, ...], float]:
    """Return the median of every layer, and of whole steps made in turn with the passes.

    In turn, because the speed of a shared machine drifts by more than passes and steps differ.
    """
    passes, steps = [], []
    for k in range(_WARM_UPS + repeats):
        samples = minibatch(k)
        timed = walk(graph, root, dataset, samples, clock, count_saved=k == 0)  # counting takes time
        if k == 0:
            counted = timed
        step_s = _whole_step(root, dataset, samples, clock)()
        if k >= _WARM_UPS:
            passes.append(timed)
            steps.append(step_s)
        report((k + 1) / (_WARM_UPS + repeats))
    entry_s = _autograd_entry_s(next(iter(samples.values())).device, clock)
    layers = (_median(rows, entry_s) for rows in zip(*passes, strict=True))
    complete = (
        replace(
            row,
            saved_bytes=first.saved_bytes,
            saved_with=first.saved_with,
            keeps=first.keeps,
            puts_out=first.puts_out,
            takes=first.takes,
        )
        for row, first in zip(layers, counted, strict=True)
    )
    return tuple(complete), statistics.median(steps)


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


def _whole_step(root: nn.Module, dataset: Dataset, samples: _Samples, clock: Clock) -> Reading:
    """Run one forward and backward of the whole model, as a user would write it."""
    parameters = [parameter for parameter in root.parameters() if parameter.requires_grad]

    def step() -> Any:
        output = root(*(samples[name] for name in dataset.inputs))
        loss = dataset.loss(output, {name: samples[name] for name in dataset.targets})
        return torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()

    return clock(step)[1]


def _load_s(dataset: Dataset, size: int, device: torch.device, repeats: int) -> float:
    """Return the seconds to fetch a minibatch's inputs and bring them to the device; the first fetch isn't counted."""
    seconds = []
    for k in range(1 + repeats):
        start = time.perf_counter()
        _fetch(dataset, size, device, dataset.inputs, k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _update_s(
    trained: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], recipe: OptimizerRecipe, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of one optimizer step per byte of parameters, and those it takes for almost none.

    Args:
        trained: the parameters.
        masters: what the optimizer steps on, on any device: `trained` itself, or else in mixed precision; rounding the
            gradients and the parameters is part of the step then.
        recipe: the optimizer.
        clock: times a step.
    """
    if not trained:
        return 0.0, 0.0
    one = [torch.zeros([1] * trained[0].dim(), dtype=trained[0].dtype, device=trained[0].device)]  # not all take [1]
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

    def step_and_round() -> None:
        for parameter, gradient in zip(stepped, given, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(rounded, stepped)

    for parameter, gradient in zip(stepped, given, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    step = optimizer.step if masters is trained else step_and_round
    readings = [clock(step)[1] for _ in range(_WARM_UPS + _OPTIMIZER_STEPS)]
    return statistics.median(reading() for reading in readings[_WARM_UPS:])


def _cpu_clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
    start = time.perf_counter()
    value = work()
    seconds = time.perf_counter() - start
    return value, lambda: seconds


def _cuda_clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
    """Time by events on the stream, which no synchronisation between the layers disturbs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    value = work()
    end.record()

    def read() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return value, read
