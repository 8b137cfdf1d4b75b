"""The analytic profile: layer costs computed from shapes for a device of the catalogue.

The pass runs on torch's meta device, where nothing is allocated or computed, so that a model of any size takes seconds.
If what a layer does depends on its data, the pass runs on samples on this machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from pipebench import formats
from pipebench.errors import ProfileError
from pipebench.model.copies import copied
from pipebench.model.graph import LayerGraph
from pipebench.model.optimizer import state_bytes_per_byte
from pipebench.model.precision import lower
from pipebench.profile.devices import DeviceSpec
from pipebench.profile.model import LayerProfile, LengthProfile, ParameterBytes, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.roofline import priced
from pipebench.profile.shapes import without_data
from pipebench.profile.walk import walk
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.registry import Dataset


def analytic_profile(
    request: ProfileRequest, device: DeviceSpec, on_progress: Callable[[str], None] | None = None
) -> Profile:
    """Compute every layer's cost on a device of the catalogue.

    Unless a layer needs data, the graph's parameters may be on the meta device, and the data set's files may be absent.
    `on_progress` gets what is computed, in words.

    Raises:
        ProfileError: a layer can't be run, or needs data that isn't there; names it.
    """
    graph, dataset, sizes, optimizer, model = request
    walks = _Walks(graph, device, len(sizes) * max(1, len(dataset.lengths)), on_progress)

    def load_s(data: Dataset) -> dict[int, float]:
        return {size: _input_bytes(data, size) / device.host_bytes_per_s + device.launch_s for size in sizes}

    lengths = tuple(
        LengthProfile(*each, walks.at(of_length, sizes), load_s(of_length))
        for each, of_length in ((each, dataset.of_length(each.columns)) for each in dataset.lengths)
    )
    layers = mean_layers(lengths) if lengths else walks.at(dataset, sizes)
    mean_load_s = {size: sum(each.share * each.load_s[size] for each in lengths) for size in sizes}
    return Profile(
        model=model,
        device=device.name,
        source="analytic",
        note=_note(graph, dataset, device, walks.needs_data),
        layers=layers,
        update_s_per_byte=_update_s_per_byte(optimizer, layers[sizes[0]], device),
        update_floor_s=device.launch_s + device.pause_s,
        load_s=mean_load_s if lengths else load_s(dataset),
        whole_step_s={},
        state_bytes_per_byte=state_bytes_per_byte(optimizer),
        lengths=lengths,
    )


class _Walks:
    """Passes through a layer graph that price its operations, without data as long as that is possible."""

    def __init__(
        self, graph: LayerGraph, device: DeviceSpec, num_walks: int, on_progress: Callable[[str], None] | None
    ) -> None:
        self._graph, self._device, self._num_walks, self._on_progress = graph, device, num_walks, on_progress
        self._root = without_data(graph.root).train()
        lower([self._root], graph.rounding)
        self._num_begun = 0
        self.needs_data = ""  # name of the first layer that needs data

    def at(self, dataset: Dataset, sizes: Sequence[int]) -> dict[int, tuple[LayerProfile, ...]]:
        """Return number of samples to the layers' costs."""
        found = {}
        for size in sizes:
            self._num_begun += 1
            if self._on_progress:
                self._on_progress(
                    f"computing all layers at {formats.num_samples(size)}, {self._num_begun} of {self._num_walks}"
                )
            found[size] = self._rows(dataset, size)
        return found

    def _rows(self, dataset: Dataset, num_samples: int) -> tuple[LayerProfile, ...]:
        """Price all layers; without data if possible, else on the first samples, noting the layer that needs them."""
        without = None
        if not self.needs_data:
            example = dataset.example(num_samples)
            try:
                return walk(self._graph, self._root, dataset, example, partial(priced, self._device))
            except ProfileError as error:
                if error.layer is None or any(parameter.is_meta for parameter in self._graph.root.parameters()):
                    raise
                self.needs_data, without = error.layer, error
        fields = [*dataset.inputs, *dataset.targets]
        try:
            samples = dataset.fetch("train", range(num_samples), fields)
        except OSError as error:
            if without is None:
                raise
            problem = str(without).rstrip(".")
            raise ProfileError(f"{problem}; nor are there data to run it with: {error}") from without
        root = copied(self._graph.root).train()
        lower([root], self._graph.rounding)
        return walk(self._graph, root, dataset, samples, partial(priced, self._device, with_data=True))


def _note(graph: LayerGraph, dataset: Dataset, device: DeviceSpec, needs_data: str) -> str:
    known = device.efficiencies
    convolutions = "product by product" if known.convolutions else f"{known.convolution:g}"
    lengths = ", ".join(f"{columns} ({share:.0%})" for columns, share in dataset.lengths)
    return (
        f"roofline of {device.name}: {_rate(device, graph)} "
        f"({convolutions} in convolutions), {device.memory_bytes_per_s / 1e9:g} GB/s x "
        f"{known.memory:g} ({device.source}), {device.launch_s * 1e6:g} us per kernel"
        + (f" and {device.pause_s * 1e6:g} us of pause after it" if device.pause_s else "")
        + "; loading is the copy from the host, without decoding"
        + (f"; {needs_data} needs data: the first samples stood for all" if needs_data else "")
        + (f"; computed at every length of {lengths}" if lengths else "")
    )


def _rate(device: DeviceSpec, graph: LayerGraph) -> str:
    low = device.tensor_flops_per_s(graph.rounding.low_type if graph.rounding else torch.float32)
    if not low:
        return f"{device.flops_per_s / 1e12:g} Tflop/s x {device.efficiencies.product:g}"
    return f"{low / 1e12:g} Tflop/s x {device.efficiencies.tensor_product:g} with tensor cores"


def _update_s_per_byte(optimizer: OptimizerRecipe, rows: Sequence[LayerProfile], device: DeviceSpec) -> float:
    """Return the seconds of one fused step per byte of parameters, from the bytes that it moves for each such byte.

    Every optimizer reads parameter and gradient and writes the parameter: 3. With momentum, which is read and written,
    it is 5; with Adam's two averages, 7. Weight decay uses what is read anyway. In mixed precision this holds for the
    masters. In addition gradients are read in 16 bits and written in 32, and parameters read in 32 and written in 16.
    """
    moved_bytes: float = 3 + 2 * state_bytes_per_byte(optimizer)
    if any(row.master_sizes for row in rows):
        rounded, stepped, _ = ParameterBytes.of(rows)
        moved_bytes = (moved_bytes * stepped + 2 * (stepped + rounded)) / rounded
    return moved_bytes / (device.memory_bytes_per_s * device.efficiencies.memory)


def _input_bytes(dataset: Dataset, num_samples: int) -> int:
    example = dataset.example(num_samples)
    return sum(example[name].nbytes for name in dataset.inputs)


def mean_layers(lengths: Sequence[LengthProfile]) -> dict[int, tuple[LayerProfile, ...]]:
    """Return number of samples to the layers' mean times and output bytes, with the longest minibatch's saved bytes.

    These are for planners, which take one length. They are means over the profiles of all lengths rather than the
    profile of the mean length, since short minibatches use a device badly.
    """
    shares = [each.share for each in lengths]
    return {
        size: tuple(_mean(shares, rows) for rows in zip(*(each.layers[size] for each in lengths), strict=True))
        for size in lengths[0].layers
    }


def _mean(shares: Sequence[float], rows: Sequence[LayerProfile]) -> LayerProfile:
    """Return a layer's row with the means, weighted by `shares`, of its rows at all lengths."""

    def mean(values: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    parts = tuple(round(mean(sizes)) for sizes in zip(*(row.output_parts for row in rows), strict=True))
    output_bytes = sum(parts) or round(mean([row.output_bytes for row in rows]))
    longest = max(rows, key=lambda row: (row.saved_bytes, row.output_bytes))
    return replace(
        longest.with_times_over(rows, mean),
        output_bytes=output_bytes,
        gradient_bytes=min(output_bytes, round(mean([row.gradient_bytes for row in rows]))),
        output_parts=parts,
    )
