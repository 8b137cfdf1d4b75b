"""Recurrent layers against closed formulas and against torch's own decomposition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from pipebench.model.graph import trace
from pipebench.profile.devices import DEVICES
from pipebench.profile.efficiencies import LAUNCH_S, SHIPPED
from pipebench.profile.recurrent import GpuKernels
from pipebench.profile.roofline import Roofline, priced
from pipebench.profile.walk import walk
from pipebench.zoo.gnmt import gnmt16
from tests.profile.judging import Sentences

V100 = DEVICES["V100"]
STEPS, SAMPLES, INPUT, HIDDEN = 5, 3, 8, 16
NUM_STATES = 2  # hidden state and cell, filled with zeros before


def run(module: nn.Module, x: Any) -> tuple[Any, Roofline, Roofline]:
    with Roofline(V100) as forward, GpuKernels():
        y, _ = module(x)
    tensor, leaf = (y.data, x.data) if isinstance(x, PackedSequence) else (y, x)
    with Roofline(V100) as backward:
        torch.autograd.grad([tensor], [leaf, *module.parameters()], [torch.empty_like(tensor)])
    return y, forward, backward


def inputs(*shape: int) -> torch.Tensor:
    return torch.empty(*shape or (STEPS, SAMPLES, INPUT), device="meta", requires_grad=True)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_flops_equal_two_products_per_gate(kind: Any, gates: int) -> None:
    """Every gate of every step multiplies the input and the last output; the backward does each product twice."""
    _, forward, backward = run(kind(INPUT, HIDDEN, device="meta"), inputs())
    per_step = gates * 2 * HIDDEN * (INPUT + HIDDEN)
    assert forward.flops == STEPS * SAMPLES * per_step
    assert backward.flops == 2 * forward.flops


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 3, "bidirectional": True},
        {"batch_first": True, "bias": False},
        {"proj_size": 4, "num_layers": 2},
    ],
    ids=str,
)
def test_flops_and_shapes_equal_torch_s_decomposition(options: dict[str, Any]) -> None:
    lstm, x = nn.LSTM(INPUT, HIDDEN, device="meta", **options), inputs()
    with FlopCounterMode(display=False) as counter:
        expected, (h, c) = lstm(x)
    with Roofline(V100) as roofline, GpuKernels():
        y, hidden = lstm(x)
    assert roofline.flops == counter.get_total_flops()
    assert (y.shape, hidden[0].shape, hidden[1].shape) == (expected.shape, h.shape, c.shape)


def test_two_kernels_per_step_and_one_product_per_direction_for_all_steps() -> None:
    _, forward, backward = run(nn.LSTM(INPUT, HIDDEN, 2, bidirectional=True, device="meta"), inputs())
    assert forward.launches == NUM_STATES + 4 * (1 + 2 * STEPS)
    assert backward.launches == 4 * (3 + 2 * STEPS)
    expected = NUM_STATES * LAUNCH_S + (forward.launches - NUM_STATES) * SHIPPED.library_launch_s
    assert forward.seconds == pytest.approx(expected)


def test_a_step_takes_as_long_as_its_tiles_but_at_least_as_reading_the_weights() -> None:
    """32 x 1024 times 1024 x 4096: half of the rows of every tile are empty; with one sample, nearly all are."""
    weights_s = 4 * 4096 * 1024 / (V100.memory_bytes_per_s * SHIPPED.memory)
    tiles_s = 2 * 64 * 4096 * 1024 / (V100.flops_per_s * SHIPPED.product)
    assert tiles_s > weights_s
    for samples in (1, 32):
        short, long = (
            run(nn.LSTM(1024, 1024, device="meta"), inputs(steps, samples, 1024))[1] for steps in (4096, 8192)
        )
        inputs_s = 2 * 4096 * samples * 1024 * 4096 / (V100.flops_per_s * SHIPPED.product)
        each_s = (long.seconds - short.seconds - inputs_s) / 4096
        assert each_s == pytest.approx(tiles_s + SHIPPED.library_launch_s, rel=0.05)
    slow_memory = replace(V100, memory_bytes_per_s=V100.memory_bytes_per_s / 10)
    with Roofline(slow_memory) as roofline, GpuKernels():
        nn.LSTM(1024, 1024, device="meta")(inputs(100, 1, 1024))
    assert roofline.seconds >= 100 * 10 * weights_s


def test_packed_sequences_do_only_the_rows_they_have() -> None:
    sizes = [3, 2, 1]
    x = PackedSequence(inputs(sum(sizes), INPUT), torch.tensor(sizes))
    _, forward, backward = run(nn.LSTM(INPUT, HIDDEN, device="meta"), x)
    assert forward.flops == sum(sizes) * 8 * HIDDEN * (INPUT + HIDDEN)
    assert backward.flops == 2 * forward.flops
    assert backward.launches == 3 + 2 * len(sizes)
    run(nn.GRU(INPUT, HIDDEN, device="meta"), x)


def test_the_gates_and_the_cell_are_saved_for_the_backward() -> None:
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with Roofline(V100), GpuKernels(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nn.LSTM(INPUT, HIDDEN, device="meta")(inputs())
    assert STEPS * SAMPLES * 5 * HIDDEN * 4 in sizes


def test_frozen_weights_cost_no_gradient() -> None:
    lstm, x = nn.LSTM(INPUT, HIDDEN, device="meta").requires_grad_(False), inputs()
    with Roofline(V100), GpuKernels():
        y, _ = lstm(x)
    with Roofline(V100) as backward:
        torch.autograd.grad([y], [x], [torch.empty_like(y)])
    assert backward.flops == STEPS * SAMPLES * 8 * HIDDEN * (INPUT + HIDDEN)


def test_sixteen_layers_of_gnmt_are_profiled_without_running_the_steps() -> None:
    with torch.device("meta"):
        graph = trace(gnmt16().train())
    dataset, calls = Sentences(50, 50), 0

    def clock(work: Any) -> Any:
        nonlocal calls
        calls += 1
        return priced(V100, work)

    rows = walk(graph, graph.root, dataset, dataset.example(64), clock)
    assert calls < 200
    assert [row.kind for row in rows].count("LSTMLayer") == 14
    lstm = next(row for row in rows if row.name == "encoder_1")
    assert 0 < lstm.forward_s < lstm.backward_s
    assert lstm.saved_bytes >= 50 * 64 * 1024 * 5 * 4
