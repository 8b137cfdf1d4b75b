"""Bytes that a graph.txt's layers save for the backward, against live tensors, and rules for each kind."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipebench.model.graph import trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.alexnet import alexnet
from pipebench.zoo.imagenet import imagenet
from pipebench.zoo.resnet import resnet50
from pipebench.zoo.vgg import vgg16

SIZE = 8
IMAGES = SIZE * 3 * 224 * 224 * 4  # which the first layer keeps, and of which a file of ours has no size


def analytic(make: Callable[[], nn.Module]) -> Profile:
    with torch.device("meta"):
        graph = trace(make())
    sgd = OptimizerRecipe("sgd", lr=0.1)
    return analytic_profile(ProfileRequest(graph, imagenet(root="nowhere"), [SIZE], sgd, "model"), DEVICES["V100"])


def total(rows: tuple[LayerProfile, ...]) -> int:
    return sum(row.saved_bytes for row in rows)


@pytest.mark.parametrize(("make", "within"), [(vgg16, 0.02), (alexnet, 0.03), (resnet50, 0.02)])
def test_saved_bytes_of_models_agree_with_their_profiles(make: Callable[[], nn.Module], within: float) -> None:
    own = analytic(make)
    read = read_graph_txt(write_graph_txt(own, SIZE), "own.graph.txt", SIZE)
    rows, expected = read.layers[SIZE], own.layers[SIZE]
    assert total(rows) == pytest.approx(total(expected) - IMAGES, rel=within)
    overstated = sum(row.output_bytes for row in expected)
    assert total(expected) < 0.85 * overstated, "what was taken before would do"


def test_saved_bytes_of_every_layer_of_vgg_agree_with_its_profile() -> None:
    own = analytic(vgg16)
    written = replace(own, layers={SIZE: own.layers[SIZE]})
    read = [row for row in read_graph_txt(write_graph_txt(written, SIZE), "own", SIZE).layers[SIZE] if not row.is_input]
    for index, (row, expected) in enumerate(zip(read, own.layers[SIZE], strict=True)):
        assert row.name == expected.name
        wanted = expected.saved_bytes - (IMAGES if index == 0 else 0)
        assert row.saved_bytes == pytest.approx(wanted, rel=0.02, abs=0.002 * total(own.layers[SIZE]))


def node(name: str, kind: str, size: str = "8.0") -> str:
    costs = f"forward_compute_time=1.0, backward_compute_time=1.0, activation_size={size}, parameter_size=0.0"
    return f"{name} -- {kind} -- {costs}"


def saved(*lines: str, edges: str) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    text = "\n".join([*lines, *(f"\t{' -- '.join(edge)}" for edge in edges.split())])
    return {row.name: (row.saved_bytes, row.saved_with) for row in read_graph_txt(text, "g").layers[1]}


def test_in_place_layers_save_no_tensor_of_their_own() -> None:
    """A convolution keeps its input, a normalisation too; a ReLU its output, which may be the normalisation's."""
    lines = (node("a", "Input", "80.0"), node("b", "Conv2d(3, 4)", "40.0"), node("c", "BatchNorm2d(4)", "40.0"))
    for kind in ("ReLU(inplace)", "ReLU(inplace=True)", "ReLU()", "relu"):
        found = saved(*lines, node("d", kind, "40.0"), node("e", "Conv2d(4, 4)", "20.0"), edges="ab bc cd de")
        assert {name: found[name] for name in "bcde"} == {
            "b": (80, ()), "c": (40, ()), "d": (40, ()), "e": (0, ((3, 40),)),
        }  # fmt: skip


def test_a_tensor_that_several_layers_save_counts_once() -> None:
    lines = (node("a", "ReLU", "40.0"), node("b", "Linear(1, 2)", "8.0"), node("c", "Linear(1, 2)", "8.0"))
    found = saved(*lines, node("d", "Add", "8.0"), edges="ab ac bd cd")
    assert {name: found[name] for name in "abcd"} == {
        "a": (40, ()),
        "b": (0, ((0, 40),)),
        "c": (0, ((1, 40),)),
        "d": (0, ()),
    }


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        ("MaxPool2d(kernel_size=2, stride=2)", 64 + 16),
        ("Dropout(p=0.5)", 2),
        ("Dropout(p=0.5, inplace=True)", 8),
        ("Dropout(p=0.5, inplace=False)", 2),
        ("View(-1)", 0),
        ("Size(0)", 0),
        ("Concat(2)", 0),
        ("log_softmax", 8),
        ("mul", 64),
        ("Classifier(  (classifier): Linear(in_features=1024, out_features=32320, bias=True))", 64),
        ("Bidirectional(  (bidir): LSTM(1024, 1024, bidirectional=True))", 64 + 8 + 5 * 8),
        ("Attention(  (attn): SomethingElse(    (linear_q): Linear(4, 4)))", 64 + 8),
        ("SomethingElse", 8),
    ],
)
def test_kinds(kind: str, num_bytes: int) -> None:
    assert saved(node("a", "Add", "64.0"), node("b", kind), edges="ab")["b"] == (num_bytes, ())


def test_an_lstm_saves_its_gates_and_readers_of_a_part_of_its_output_save_that() -> None:
    lines = (node("a", "Add", "64.0"), node("b", "LSTM(4, 4)", "[32.0; 4.0; 4.0]"), node("c", "__getitem__(0)", "32.0"))
    found = saved(*lines, node("d", "Linear(4, 4)", "16.0"), edges="ab bc cd")
    assert {name: found[name] for name in "bcd"} == {"b": (64 + 32 + 5 * 32, ()), "c": (0, ()), "d": (0, ((1, 32),))}


def test_a_loss_saves_log_probabilities() -> None:
    assert saved(node("a", "Linear(4, 4)", "64.0"), edges="")["loss"] == (64, ())
