"""The analytic profile: computed for a device that isn't here, from shapes alone, in seconds for any size.

Nothing is allocated and no arithmetic is done: the pass runs on torch's meta device. Only where a layer needs data,
since what it does depends on it, is the pass made on some, here.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pipebench.errors import ProfileError
from pipebench.model.graph import LayerGraph
from pipebench.model.optimizer import state_bytes_per_byte
from pipebench.model.precision import lower
from pipebench.profile.devices import DeviceSpec
from pipebench.profile.efficiencies import SHIPPED
from pipebench.profile.lengths import mean_layers, mean_load_s
from pipebench.profile.model import LayerProfile, LengthProfile, Profile
from pipebench.profile.roofline import priced
from pipebench.profile.shapes import without_data
from pipebench.profile.walk import walk
from pipebench.recipe.schema import OptimizerRecipe
from zoo.registry import Dataset


def analytic_profile(
    graph: LayerGraph,
    dataset: Dataset,
    sizes: Sequence[int],
    device: DeviceSpec,
    optimizer: OptimizerRecipe,
    model_text: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Compute what every layer costs on a device of the catalogue.

    Args:
        graph: the layer graph; its parameters may be on any device, meta included.
        dataset: gives shapes and the loss; its data needn't be there, unless a layer needs it.
        sizes: numbers of samples that travel.
        device: the device.
        optimizer: what updates the parameters.
        model_text: readable description of the model.
        on_progress: told of (layers profiled, layers to profile).

    Raises:
        ProfileError: a layer can't be run, or needs data that isn't there; names it.
    """
    walks = _Walks(graph, device, len(sizes) * max(1, len(dataset.lengths)), on_progress)

    def load_s(data: Dataset) -> dict[int, float]:
        return {size: _input_bytes(data, size) / device.host_bytes_per_s + device.launch_s for size in sizes}

    lengths = tuple(
        LengthProfile(columns, share, walks.at(of_length, sizes), load_s(of_length))
        for columns, share, of_length in ((*each, dataset.of_length(each.columns)) for each in dataset.lengths)
    )
    layers = mean_layers(lengths) if lengths else walks.at(dataset, sizes)
    return Profile(
        model=model_text,
        device=device.name,
        source="analytic",
        note=(
            f"roofline of {device.name}: {_rate(device, graph)} "
            f"({SHIPPED.convolution:g} in convolutions), {device.memory_bytes_per_s / 1e9:g} GB/s x "
            f"{SHIPPED.memory:g} ({device.source}), {device.launch_s * 1e6:g} us per kernel"
            + (f" and {device.pause_s * 1e6:g} us of pause after it" if device.pause_s else "")
            + "; "
            "loading is the copy from the host, without decoding"
            + (f"; {walks.needs_data} needs data: the first samples stood for all" if walks.needs_data else "")
            + (f"; computed at every length of {_told(dataset)}" if lengths else "")
        ),
        layers=layers,
        update_s_per_byte=_bytes_per_parameter_byte(optimizer, layers[sizes[0]])
        / (device.memory_bytes_per_s * SHIPPED.memory),
        update_floor_s=device.launch_s + device.pause_s,
        load_s=mean_load_s(lengths) if lengths else load_s(dataset),
        whole_step_s={},
        state_bytes_per_byte=state_bytes_per_byte(optimizer),
        lengths=lengths,
    )


class _Walks:
    """Passes through a layer graph that price its operations, without data as long as that is possible.

    Attributes:
        needs_data: the layer because of which data is needed; empty if none is.
    """

    def __init__(
        self, graph: LayerGraph, device: DeviceSpec, num_walks: int, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._graph, self._device, self._num_walks, self._on_progress = graph, device, num_walks, on_progress
        self._root = without_data(graph.root).train()
        lower([self._root], graph.rounding)
        self._done = 0
        self.needs_data = ""

    def at(self, dataset: Dataset, sizes: Sequence[int]) -> dict[int, tuple[LayerProfile, ...]]:
        """Return the rows at some numbers of samples.

        Raises:
            ProfileError: see `analytic_profile`.
        """
        num_layers, found = len(self._graph.layers) + 1, {}
        for size in sizes:
            found[size] = self._rows(dataset, size)
            self._done += 1
            if self._on_progress:
                self._on_progress(self._done * num_layers, self._num_walks * num_layers)
        return found

    def _rows(self, dataset: Dataset, num_samples: int) -> tuple[LayerProfile, ...]:
        if not self.needs_data:
            example = dataset.example(num_samples)
            try:
                return walk(self._graph, self._root, dataset, example, partial(priced, self._device))
            except ProfileError as error:
                if error.layer is None or any(parameter.is_meta for parameter in self._graph.root.parameters()):
                    raise
                self.needs_data = error.layer
        fields = [*dataset.inputs, *dataset.targets]
        samples = dataset.fetch("train", range(num_samples), fields)
        root = copy.deepcopy(self._graph.root).train()
        lower([root], self._graph.rounding)
        return walk(self._graph, root, dataset, samples, partial(priced, self._device, with_data=True))


def _told(dataset: Dataset) -> str:
    """Return the lengths that a data set declares: `9 (6 %), 19 (29 %)`."""
    return ", ".join(f"{columns} ({share:.0%})" for columns, share in dataset.lengths)


def _rate(device: DeviceSpec, graph: LayerGraph) -> str:
    low = device.tensor_flops_per_s(graph.rounding.low_type) if graph.rounding else 0.0
    if not low:
        return f"{device.flops_per_s / 1e12:g} Tflop/s x {SHIPPED.product:g}"
    return f"{low / 1e12:g} Tflop/s x {SHIPPED.tensor_product:g} with tensor cores"


def _bytes_per_parameter_byte(optimizer: OptimizerRecipe, rows: Sequence[LayerProfile]) -> float:
    """Return how many bytes one fused step moves per byte of parameters.

    Every rule reads parameter and gradient and writes the parameter: 3. Momentum is read and written besides: 5. Adam
    has two such averages: 7. Weight decay uses what is already read. In mixed precision that goes for the masters;
    besides, the gradient is read in the parameter's type and written in the master's, and parameters the other way.
    """
    step = 3 + 2 * state_bytes_per_byte(optimizer)
    own = {name: size for row in rows for name, size in row.parameter_sizes.items()}
    masters = {name: size for row in rows for name, size in row.master_sizes.items()}
    if not masters:
        return step
    stepped, rounded = sum(masters.values()), sum(own.values())
    return (step * stepped + 2 * (stepped + rounded)) / rounded


def _input_bytes(dataset: Dataset, num_samples: int) -> int:
    example: dict[str, torch.Tensor] = dataset.example(num_samples)
    return sum(example[name].nbytes for name in dataset.inputs)
