"""Text in streams: every stage carries its state on, whatever the mode, cut, replicas and microbatches."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.model.sampling import Streams
from pipebench.zoo.registry import Dataset
from tests.support import make_engine, make_setup, parameters_of

VOCABULARY, LENGTH, ROWS, STREAMS = 7, 3, 4, 2


class Text(Dataset):
    """A random text in chunks of 3 tokens; the last chunk of the held-out text is short."""

    inputs: Sequence[str] = ("tokens",)
    targets: Sequence[str] = ("next_tokens",)
    metrics: Mapping[str, str] = {"nll": "min"}
    sequential = True

    def __init__(self, num_train: int = 2 * 4 * 5 + 3, held_out_tokens: int = 50) -> None:
        generator = torch.Generator().manual_seed(5)
        self.num_train = num_train
        self.num_eval = -(-held_out_tokens // LENGTH)
        self.text = {
            "train": torch.randint(VOCABULARY, (num_train * LENGTH + 1,), generator=generator),
            "eval": torch.randint(VOCABULARY, (held_out_tokens + 1,), generator=generator),
        }

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(num_samples, LENGTH, dtype=torch.int64, device="meta") for name in self._fields}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        text = self.text[split]
        padded = torch.cat([text, torch.full(((max(indices) + 2) * LENGTH,), -1)])
        starts = [i * LENGTH for i in indices]
        tokens = torch.stack([padded[a : a + LENGTH] for a in starts])
        following = torch.stack([padded[a + 1 : a + 1 + LENGTH] for a in starts])
        both = {"tokens": tokens.clamp(min=0), "next_tokens": following}
        return {field: both[field] for field in fields}

    def weight(self, split: str, indices: Sequence[int]) -> float:
        return float((self.fetch(split, indices, ["next_tokens"])["next_tokens"] >= 0).sum())

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(
            output.flatten(0, 1), targets["next_tokens"].flatten(), reduction="sum", ignore_index=-1
        )

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"nll": self.loss(output, targets)}

    @property
    def _fields(self) -> list[str]:
        return [*self.inputs, *self.targets]


class Carrying(nn.Module):
    """An LSTM that carries its state to the next minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.carried_state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, length, 6] to the same shape."""
        output, state = self.lstm(x, self.carried_state)
        self.carried_state = tuple(each.detach() for each in state)
        return output


class LanguageModel(nn.Module):
    """Two of them, dropout between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.table = nn.Embedding(VOCABULARY, 6)
        self.one, self.two = Carrying(), Carrying()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, VOCABULARY)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [rows, length] to logits."""
        return self.head(self.drop(self.two(self.one(self.table(tokens)))))


def by_hand(
    groups: Sequence[Sequence[int]], lr: float, num_chunks: int = 5
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with states kept by stream, on groups of minibatches with one update each; return weights and losses."""
    model, data = LanguageModel(), Text()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    states: dict[int, tuple[Any, Any]] = {}
    losses = []
    for group in groups:
        optimizer.zero_grad()
        for k in group:
            chunk, stream = divmod(k % (STREAMS * num_chunks), STREAMS)
            rows = [(stream * ROWS + row) * num_chunks + chunk for row in range(ROWS)]
            fetched = data.fetch("train", rows, ["tokens", "next_tokens"])
            before = (None, None) if chunk == 0 else states[stream]
            model.one.carried_state, model.two.carried_state = before
            loss = data.loss(model(fetched["tokens"]), fetched)
            states[stream] = (model.one.carried_state, model.two.carried_state)
            losses.append(loss.item())
            (loss / (len(group) * ROWS * LENGTH)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def text_setup(
    plan: Any, *, lr: float = 0.1, dropout: float = 0.0, dtype: torch.dtype = torch.float64, **columns: Any
) -> Any:
    data = Text()
    return make_setup(
        LanguageModel(dropout).to(dtype), plan, dataset=data, minibatch_size=ROWS, lr=lambda *_: lr,
        sampler=Streams(data.num_train, ROWS, STREAMS), held_out=Streams(data.num_eval, ROWS, STREAMS, covers=True),
        **columns,
    )  # fmt: skip


def singles(n: int) -> list[list[int]]:
    return [[k] for k in range(n)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "columns", "groups"),
    [
        (([], [1]), {"weights": "one", "depth": 1}, singles(14)),
        (([2, 3], [1, 1, 1]), {"weights": "one", "depth": 1}, singles(14)),
        (([2], [1, 1]), {"weights": "one", "order": "all-forwards", "microbatches": 2}, singles(14)),
        (([2], [1, 1]), {"weights": "one", "order": "all-forwards", "microbatches": 2, "recompute": True}, singles(14)),
        (([1, 3], [1, 1, 1]), {"weights": "one", "microbatches": 4}, singles(14)),
        (([], [2]), {"weights": "stash", "depth": 1}, [[k, k + 1] for k in range(0, 14, 2)]),
        (([2], [2, 1]), {"weights": "one", "accumulate": 1}, [[k, k + 1] for k in range(0, 14, 2)]),
    ],
    ids=["single", "model", "gpipe", "gpipe-recompute", "flush", "dp", "hybrid"],
)
def test_modes_without_staleness_equal_a_plain_loop_with_states(plan: Any, columns: Any, groups: Any) -> None:
    """14 minibatches are an epoch of 10 and part of the next, where states start anew; there is a drain at 8."""
    engine = make_engine(text_setup(plan, **columns))
    engine.train(0, 8)
    engine.train(8, 6)
    expected, _ = by_hand(groups, 0.1)
    for name, value in parameters_of(engine).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "plan", [([2, 3], [1, 1, 1]), ([2], [2, 1]), ([2], [1, 2]), ([1, 2, 3], [2, 1, 2, 1])], ids=str
)
def test_pipedream_carries_every_streams_state_through_its_stages(plan: Any) -> None:
    """With a rate of zero stale weights are right ones: the losses show the states alone."""
    found: list[float] = []
    setup = text_setup(plan, lr=0.0)
    engine = make_engine(setup)
    engine._on_loss = lambda loss, *_: found.append(loss.item())
    engine.train(0, 6)
    engine.train(6, 8)
    _, losses = by_hand(singles(14), 0.0)
    assert sorted(found) == pytest.approx(sorted(losses), rel=1e-12)


def test_the_check_of_states_can_fail() -> None:
    """Without states, the losses compared above differ."""
    found: list[float] = []
    engine = make_engine(text_setup(([2, 3], [1, 1, 1]), lr=0.0))
    engine._on_loss = lambda loss, *_: found.append(loss.item())
    for replica in engine.replicas:
        replica.states.modules = []
    engine.train(0, 14)
    _, losses = by_hand(singles(14), 0.0)
    assert max(abs(a - b) for a, b in zip(sorted(found), sorted(losses), strict=True)) > 1e-6


@pytest.mark.parametrize("plan", [([], [1]), ([2, 3], [1, 1, 1]), ([2], [2, 1])], ids=str)
def test_evaluation_covers_the_whole_text_row_by_row(plan: Any) -> None:
    """50 tokens in 17 chunks: 8 rows of 3 chunks each, the last ones padding; training goes on untouched."""
    engine = make_engine(text_setup(plan, lr=0.0))
    engine.train(0, 4)
    states = [dict(replica.states) for replica in engine.replicas]
    found = engine.evaluate()
    model, text = LanguageModel().eval(), Text().text["eval"]
    total = 0.0
    with torch.no_grad():
        for start in range(0, 50, 3 * LENGTH):
            stop = min(start + 3 * LENGTH, 50)
            model.one.carried_state = model.two.carried_state = None
            logits = model(text[None, start:stop])
            total += functional.cross_entropy(logits[0], text[start + 1 : stop + 1], reduction="sum").item()
    assert found["nll"] == pytest.approx(total / 50, rel=1e-12)
    assert found["eval_loss"] == found["nll"]
    for replica, before in zip(engine.replicas, states, strict=True):
        for place, state in before.items():
            assert all(a is b for a, b in zip(state, replica.states[place], strict=True))


def test_recomputation_has_the_forward_s_draws_and_states() -> None:
    found = []
    for recompute in (False, True):
        engine = make_engine(
            text_setup(([2], [1, 1]), dropout=0.5, weights="one", order="all-forwards", microbatches=2,
                       recompute=recompute)
        )  # fmt: skip
        engine.train(0, 6)
        found.append(parameters_of(engine))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Inside(nn.Module):
    """One layer with a stateful module inside."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = Carrying()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, length, 6] to the same shape."""
        return self.inner(x)


def test_states_inside_a_layer_are_carried_by_stream_too() -> None:
    found: list[float] = []
    model = LanguageModel()
    wrapped = Inside()
    wrapped.inner, model.one = model.one, wrapped  # type: ignore[assignment]
    data = Text()
    setup = make_setup(
        model, ([2], [1, 1]), dataset=data, minibatch_size=ROWS, lr=lambda *_: 0.0,
        sampler=Streams(data.num_train, ROWS, STREAMS), held_out=Streams(data.num_eval, ROWS, STREAMS, covers=True),
    )  # fmt: skip
    engine = make_engine(setup)
    engine._on_loss = lambda loss, *_: found.append(loss.item())
    engine.train(0, 14)
    assert engine.replicas[0].stage.stateful == ("one.inner",)
    _, losses = by_hand(singles(14), 0.0)
    assert sorted(found) == pytest.approx(sorted(losses), rel=1e-12)


def test_an_evaluation_leaves_no_states() -> None:
    engine = make_engine(text_setup(([2, 3], [1, 1, 1])))
    engine.train(0, 4)
    before = [replica.live_bytes() for replica in engine.replicas]
    engine.evaluate()
    assert [replica.live_bytes() for replica in engine.replicas] == before
