"""A stage computes the same bits whichever of its layers are recomputed, and keeps only what it needs."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.replica import UnitInput
from pipebench.errors import PlanError
from pipebench.model.graph import trace
from pipebench.model.plan import memory_of
from tests.models import SkipNet
from tests.replicas import replicas_of, run


class Overwrites(nn.Module):
    """Overwrites what earlier layers read, through a view too, where autograd itself doesn't mind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        shifted = hidden + 1.0  # saves nothing of what it reads
        picked = hidden.view(-1, 2, 4)
        picked.mul_(2.0)
        functional.relu_(shifted)
        tail: torch.Tensor = self.second(shifted).sin()
        return tail.add_(picked.sum(1))


class Counts(nn.Module):
    """Draws on a buffer that every forward changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        hidden = torch.sin(self.first(x) + self.seen)
        return self.last(torch.cos(hidden + self.seen))


@pytest.mark.parametrize("make", [Overwrites, Counts])
def test_any_layers_are_recomputed_with_the_same_bits(make: type[nn.Module]) -> None:
    torch.default_generator.manual_seed(0)
    model, draw = make().double(), random.Random(0)
    units = [(torch.randn(5, 6, dtype=torch.float64), torch.randint(4, (5,))) for _ in range(3)]
    num_layers = len(trace(model).layers)
    for start in ([], [num_layers // 2]):
        kept = run(replicas_of(model, start, "keep"), units)
        assert len(kept) >= 4
        chosen = [[draw.choice(("keep", "recompute")) for _ in range(num_layers)] for _ in range(15)]
        for policies in (*chosen, ["recompute"] * num_layers):
            found = run(replicas_of(model, start, policies), units)
            assert found.keys() == kept.keys()
            for name, value in kept.items():
                assert torch.equal(found[name], value), (name, policies)


def test_sent_values_are_freed() -> None:
    """The sender doesn't hold values that its backward doesn't need."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    first, _ = replicas_of(model, [1], "keep")
    out, _ = first.forward(UnitInput(0, (0, 0), [torch.randn(5, 6, dtype=torch.float64)], {}, 0))
    (value,) = out.values()
    left = weakref.ref(value.untyped_storage())
    del out, value
    gc.collect()
    assert left() is None
    first.backward(0, {0: [torch.ones(5, 8, dtype=torch.float64)]})
    assert all(gradient is not None for gradient in first.gradients)


def test_a_recomputed_last_run_keeps_neither_its_output_nor_the_loss_s_tensors() -> None:
    """For a large vocabulary, logits and their softmax are the largest tensors."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1000)).double()
    unit = (torch.randn(5, 6, dtype=torch.float64), torch.randint(1000, (5,)))
    held = {}
    for policy in ("keep", "recompute"):
        (replica,) = replicas_of(model, [], ["keep", "keep", policy])
        before = replica.live_bytes()
        replica.forward(UnitInput(0, (0, 0), [unit[0]], {}, 0, loss=lambda o: functional.cross_entropy(o, unit[1])))
        held[policy] = replica.live_bytes() - before
    assert held["keep"] > 5 * 1000 * 8
    assert held["recompute"] < 5 * 100 * 8


def test_layers_are_chosen_by_name_or_pattern() -> None:
    names = [layer.name for layer in trace(SkipNet()).layers]
    chosen = memory_of(names, [names[0], f"{names[2][:3]}*"])
    matching = {names[0], *(name for name in names if name.startswith(names[2][:3]))}
    assert {name for name, policy in zip(names, chosen, strict=True) if policy == "recompute"} == matching
    with pytest.raises(PlanError, match=rf"the model has no layer '{names[1]}x'; did you mean '{names[1]}'"):
        memory_of(names, [f"{names[1]}x"])
