"""The pass through the layers: names, bytes and gradients of layers of all kinds."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.errors import ProfileError
from pipebench.model.graph import trace
from pipebench.profile.clocks import Reading
from pipebench.profile.model import LayerProfile
from pipebench.profile.walk import walk
from tests.models import HalfFrozen
from tests.support import Blobs


class Tokens(Blobs):
    """Integers in, as for a language model: [samples, 5] int64."""

    inputs: Sequence[str] = ("tokens",)

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(num_samples, 5, dtype=torch.int64, device="meta")
        return {"tokens": tokens, "label": torch.zeros(num_samples, dtype=torch.int64, device="meta")}


class InPlace(nn.Module):
    """An in-place layer at every place that can be a head, one of them a method."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        x = self.relu(self.first(x))
        x = x.mul_(2.0)
        x += 1.0
        return self.last(x)


class Sequences(nn.Module):
    """Embedding, an LSTM with its tuple of states, and an integer on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [samples, 5] to [samples, 4]."""
        longest = tokens.argmax(1)
        hidden, _ = self.lstm(self.embed(tokens))
        return hidden[:, -1] + longest.unsqueeze(1)


def numbered() -> Callable[[Callable[[], Any]], tuple[Any, Reading]]:
    """Return a clock whose n-th piece of work takes n seconds."""
    count = iter(range(1, 1000))

    def clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
        seconds = float(next(count))
        return work(), lambda: seconds

    return clock


def profiled(model: nn.Module, dataset: Blobs, samples: Mapping[str, torch.Tensor]) -> tuple[LayerProfile, ...]:
    graph = trace(model.to(next(iter(samples.values())).device))
    return walk(graph, graph.root, dataset, samples, numbered())


def test_forwards_in_order_then_backwards_in_reverse() -> None:
    rows = profiled(InPlace(), Blobs(), Blobs().fetch("train", range(3), ["x", "label"]))
    assert [row.name for row in rows] == ["first", "relu", "mul_", "add", "last", "loss"]
    assert [row.forward_s for row in rows] == [1, 2, 3, 4, 5, 6]
    # Of the last layer the weight part is timed apart, before the whole; the first has no other part.
    assert [row.backward_s for row in rows] == [13, 12, 11, 10, 9, 7]
    assert [row.weight_s for row in rows] == [13, 0, 0, 0, 8, 0]


def test_bytes() -> None:
    rows = {row.name: row for row in profiled(InPlace(), Blobs(), Blobs().example(3))}
    assert rows["first"].parameter_bytes == (6 * 6 + 6) * 8
    assert rows["first"].output_bytes == rows["first"].gradient_bytes == 3 * 6 * 8
    assert rows["relu"].parameter_bytes == 0
    assert rows["last"].output_bytes == 3 * 4 * 8
    assert rows["loss"].output_bytes == 8


def test_tuples_and_integers() -> None:
    rows = {row.name: row for row in profiled(Sequences(), Tokens(), Tokens().example(2))}
    assert rows["argmax"].output_bytes == 2 * 8
    assert (rows["argmax"].gradient_bytes, rows["argmax"].backward_s) == (0, 0)
    assert rows["lstm"].output_bytes == rows["lstm"].gradient_bytes == (2 * 5 * 4 + 2 * 2 * 4) * 4
    assert rows["lstm"].parameter_bytes == 4 * (4 * 3 + 4 * 4 + 4 + 4) * 4
    assert rows["add"].gradient_bytes == 2 * 4 * 4


def test_a_buffer_counts_where_it_is_held() -> None:
    """BatchNorm's statistics and counter, in eval mode as well, and a constant that is read."""
    dataset = Blobs(shape=(2, 8, 8))
    rows = profiled(HalfFrozen().double(), dataset, dataset.example(3))
    assert {row.name: [*row.untrained_sizes.values()] for row in rows if row.untrained_sizes} == {
        "add": [2 * 8 * 8 * 8], "features_1": [6 * 8, 6 * 8, 8], "features_5": [5 * 8, 5 * 8, 8],
    }  # fmt: skip


def test_a_frozen_beginning_has_no_backward() -> None:
    model = InPlace()
    model.first.requires_grad_(False)
    rows = {row.name: row for row in profiled(model, Blobs(), Blobs().example(3))}
    assert [rows[name].backward_s for name in ("first", "relu", "add")] == [0, 0, 0]
    assert (rows["first"].parameter_bytes, rows["first"].gradient_bytes) == (0, 0)
    assert [rows[name].untrained_sizes for name in ("first", "relu", "last")] == [
        {"first.weight": 6 * 6 * 8, "first.bias": 6 * 8}, {}, {},
    ]  # fmt: skip
    assert rows["last"].backward_s > 0


class Fork(nn.Module):
    """A value that three layers read, one of them without a gradient, and a parameter that two layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.second = nn.Linear(6, 6, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        x = self.first(x)
        y = self.second(x) + x
        return self.last(y + (x > 0))


def test_gradients_that_meet_are_added_by_the_layer_they_meet_at() -> None:
    graph, dataset = trace(Fork()), Blobs()
    added: list[list[str]] = []

    def clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
        with torch.profiler.profile(acc_events=True) as profile:
            value = work()
        added.append([str(list(event.input_shapes)) for event in profile.events() if event.name == "aten::add_"])
        return value, lambda: 0.0

    walk(graph, graph.root, dataset, dataset.fetch("train", range(3), ["x", "label"]), clock)
    names = [*(layer.name for layer in graph.layers), "loss"]
    timed = [name for name in reversed(names) if name != "gt"]
    for name in ("second", "last"):  # their weight parts are timed apart, before the whole
        timed.insert(timed.index(name), f"the weight part of {name}")
    backward = dict(zip(timed, added[len(names) :], strict=True))
    assert {name: len(sums) for name, sums in backward.items() if sums} == {"first": 2}


def test_values_are_freed_as_in_training() -> None:
    """A frozen layer saves nothing for a backward, so its inputs are freed."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False, dtype=torch.float64).requires_grad_(False) for _ in range(4)))
    graph, dataset = trace(model), Blobs(classes=6)
    alive: list[weakref.ref[torch.Tensor]] = []

    def clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
        value = work()
        alive.append(weakref.ref(value))
        return value, lambda: 0.0

    samples = dataset.fetch("train", range(3), ["x", "label"])
    walk(graph, graph.root, dataset, samples, clock)
    assert [each() for each in alive] == [None] * 5


def test_a_weight_gradient_timed_alone_is_freed_before_the_whole_backward() -> None:
    """Beside the whole backward's it would take the bytes of the parameters once more."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(2)))
    graph, dataset = trace(model), Blobs(classes=6)
    made: list[list[weakref.ref[torch.Tensor]]] = []
    alive_at_start: list[int] = []

    def clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
        alive_at_start.append(sum(each() is not None for each in made[-1]) if made else 0)
        value = work()
        gradients = value if isinstance(value, tuple) else ()
        made.append([weakref.ref(each) for each in gradients if each is not None])
        return value, lambda: 0.0

    walk(graph, graph.root, dataset, dataset.fetch("train", range(3), ["x", "label"]), clock)
    # Backwards: the loss, the weight part of the last layer, the whole of it, the first layer.
    assert [len(each) for each in made[3:]] == [1, 1, 2, 1]
    assert alive_at_start[3:] == [0, 0, 0, 0]


def test_the_pass_leaves_no_gradients_and_reads_the_right_values() -> None:
    model, dataset = InPlace(), Blobs()
    samples = dataset.fetch("train", range(3), ["x", "label"])
    before = {name: value.clone() for name, value in samples.items()}
    seen: list[Any] = []

    def clock(work: Callable[[], Any]) -> tuple[Any, Reading]:
        seen.append(work())
        return seen[-1], lambda: 0.0

    graph = trace(model)
    walk(graph, graph.root, dataset, samples, clock)
    expected = dataset.loss(model(before["x"]), before)
    assert torch.equal(seen[len(graph.layers)], expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(samples["x"], before["x"])


def test_a_failing_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64))
    with pytest.raises(
        ProfileError, match=r"^layer _1 \(Linear\) can't be profiled, its forward fails: RuntimeError: "
    ):
        profiled(model, Blobs(), Blobs().fetch("train", range(3), ["x", "label"]))
