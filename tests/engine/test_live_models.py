"""Layers that move in models with buffers, random layers, carried states and skips, against the oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.model.sampling import Streams, mix, name_hash, seed_default_generator
from pipebench.schedule.operations import SWAP_IN, SWAP_OUT
from tests.engine.test_live_moves import TRAINED, check
from tests.engine.test_streams import LENGTH, ROWS, STREAMS, LanguageModel, Text
from tests.models import ConvNet, RandomNet, SkipNet
from tests.support import Blobs

IMAGES = Blobs(num_train=4 * TRAINED, shape=(2, 8, 8), dtype=torch.float32)


def seeded(model: nn.Module, k: Callable[[], int]) -> nn.Module:
    """Let dropout draw from (seed, minibatch, microbatch, layer), as every engine does."""
    draws = {str(layer.node.target): layer.draws_as for layer in trace(model).layers if layer.draws_as}
    for path, name in draws.items():

        def seed(*_: Any, name: str = str(name)) -> None:
            seed_default_generator(torch.device("cpu"), mix(mix(0, name_hash(name)), k(), 0))

        model.get_submodule(path).register_forward_pre_hook(seed)
    return model


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", ["keep", "recompute", "swap"])
@pytest.mark.parametrize(
    ("before", "after"), [((3, 6), (2, 8)), ((2, 5), (4, 7)), ((4, 7), (2, 6)), ((4,), (6,)), ((6,), (4,))]
)
def test_running_statistics_and_draws(before: tuple[int, ...], after: tuple[int, ...], policy: str) -> None:
    """Statistics are those of a plain loop: recomputed forwards don't change them."""
    model = ConvNet(dropout=0.4)
    graph = trace(model)
    memory = [policy if index % 3 else "keep" for index in range(len(graph.layers))]
    plan = make_plan(graph, before, [1] * (len(before) + 1), memory=memory)
    moves = [Repartition(8, after), Repartition(15, before)]
    engine = check(before, moves, model=model, dataset=IMAGES, plan=plan, wraps=seeded)
    copied = {kind for kind, _ in engine.num_bytes if kind in (SWAP_OUT, SWAP_IN)}
    assert copied == ({SWAP_OUT, SWAP_IN} if policy == "swap" else set())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(12))
def test_values_that_skip_stages(number: int) -> None:
    """Gradients of more than two readers are added in an order that depends on the cuts, so they differ in rounding."""
    draw = torch.Generator().manual_seed(number)

    def some(low: int, high: int, count: int) -> list[int]:
        return sorted((torch.randperm(high - low, generator=draw)[:count] + low).tolist())

    reads = [some(0, index + 1, min(index + 1, 1 + number % 3)) for index in range(6)]
    model = RandomNet(reads)
    num_layers = len(trace(model).layers)
    p = 2 + number % 3
    tried = 0
    while True:
        before, after = tuple(some(1, num_layers, p - 1)), tuple(some(1, num_layers, p - 1))
        tried += 1
        bounds, others = [0, *before, num_layers], [0, *after, num_layers]
        stay = all(max(a, c) < min(b, d) for a, b, c, d in zip(bounds, bounds[1:], others, others[1:], strict=False))
        if stay and before != after:
            break
    check(before, [Repartition(9, after), Repartition(17, before)], model=model, tolerance=1e-12)


@pytest.mark.parametrize(
    ("before", "after"), [((5, 10), (8, 12)), ((8, 12), (5, 10)), ((3, 9), (6, 10)), ((4,), (9,)), ((9,), (4,))]
)
def test_values_that_are_overwritten(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    check(before, [Repartition(9, after)], model=SkipNet(), tolerance=1e-12)


@pytest.mark.parametrize(("before", "after"), [((1, 3), (2, 4)), ((2, 3), (1, 2 + 1)), ((2, 4), (1, 3)), ((1,), (3,))])
def test_states_that_are_carried_on(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    data = Text(num_train=STREAMS * ROWS * 11)
    states: dict[int, Any] = {}

    def carrying(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], k: int) -> torch.Tensor:
        chunk, stream = divmod(k, STREAMS)
        rows = [(stream * ROWS + row) * 11 + chunk for row in range(ROWS)]
        fetched = data.fetch("train", rows, ["tokens", "next_tokens"])
        assert isinstance(model, LanguageModel)
        model.one.carried_state, model.two.carried_state = states.get(stream, (None, None))
        loss = data.loss(run(fetched["tokens"]), fetched) / (ROWS * LENGTH)
        states[stream] = (model.one.carried_state, model.two.carried_state)
        return loss

    check(
        before, [Repartition(9, after)], model=LanguageModel(), dataset=data, minibatch_size=ROWS, loss=carrying,
        sampler=Streams(data.num_train, ROWS, STREAMS), held_out=Streams(data.num_eval, ROWS, STREAMS, covers=True),
    )  # fmt: skip
