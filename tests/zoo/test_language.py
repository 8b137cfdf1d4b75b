"""Texts in chunks: every token predicted once, padding, loss, perplexity, vocabulary."""

import math

import pytest
import torch

from pipebench.model.sampling import Streams
from pipebench.zoo.language import encode, most_frequent
from pipebench.zoo.registry import Dataset
from tests.zoo.texts import PANGRAM, Letters

FIELDS = ["tokens", "next_tokens"]


def ids(text: str) -> list[int]:
    return Letters(text, 1).text("train").tolist()


def test_protocol() -> None:
    data: Dataset = Letters()
    assert data.sequential
    assert (data.inputs, data.targets, data.metrics) == (("tokens",), ("next_tokens",), {"perplexity": "min"})


@pytest.mark.parametrize("bptt", [1, 4, 5, 43, 44, 100])
def test_every_token_but_the_first_is_predicted_once(bptt: int) -> None:
    data = Letters(PANGRAM, bptt)
    assert data.num_eval == data.num_train == -(-43 // bptt)
    fields = data.fetch("eval", range(data.num_eval), FIELDS)
    predicted = fields["next_tokens"] >= 0
    assert fields["next_tokens"][predicted].tolist() == ids(PANGRAM)[1:]
    assert fields["tokens"][predicted].tolist() == ids(PANGRAM)[:-1]
    assert predicted.sum() == 43
    assert predicted.flatten()[:43].all()  # what is missing is at the end
    assert not fields["tokens"][~predicted].any()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_chunks_past_the_end_are_padding(split: str) -> None:
    data = Letters(PANGRAM, 5)
    fields = data.fetch(split, [7, 8, 9, 1000], FIELDS)
    assert fields["next_tokens"][0].min() >= 0
    assert (fields["next_tokens"][1] >= 0).tolist() == [True, True, True, False, False]
    assert (fields["next_tokens"][2:] == -1).all()
    assert not fields["tokens"][2:].any()
    assert [data.weight(split, [index]) for index in (7, 8, 9, 1000)] == [5, 3, 0, 0]
    assert data.weight(split, [7, 8, 9, 1000]) == 8


def test_a_whole_last_chunk_is_not_padded() -> None:
    data = Letters(PANGRAM[:21], 5)
    assert data.num_train == 4
    assert data.fetch("train", [3], FIELDS)["next_tokens"].min() >= 0
    assert data.weight("train", range(4)) == 20


def test_rows_of_a_sampler_continue_each_other() -> None:
    """Minibatches of three rows in two streams: every row, minibatch after minibatch, is running text."""
    data = Letters()
    sampler = Streams(data.num_train, 3, 2)
    for stream in range(2):
        chunks = [
            data.fetch("train", sampler.indices(k), ["tokens"])["tokens"]
            for k in range(stream, sampler.minibatches_per_epoch, 2)
        ]
        for row in torch.cat(chunks, dim=1).tolist():
            first = data.text("train").unfold(0, len(row), 1).tolist()
            assert row in first


def test_fetch_is_a_pure_function_of_indices() -> None:
    data = Letters()
    both = data.fetch("train", [7, 3], FIELDS)
    for position, index in enumerate([7, 3]):
        alone = data.fetch("train", [index], FIELDS)
        assert all(torch.equal(both[field][position], alone[field][0]) for field in FIELDS)
    both["tokens"].zero_()
    assert data.fetch("train", [7], ["tokens"])["tokens"].any()
    assert list(data.fetch("train", [0], ["next_tokens"])) == ["next_tokens"]
    assert list(data.fetch("train", [0], ["next_tokens", "tokens"])) == ["next_tokens", "tokens"]


def test_fields_match_the_example() -> None:
    data = Letters()
    for field, meta in data.example(3).items():
        fetched = data.fetch("eval", [0, 1, 2], [field])[field]
        assert (fetched.shape, fetched.dtype) == (meta.shape, meta.dtype)
        assert meta.is_meta


def test_loss_is_the_cross_entropy_of_the_targets_summed() -> None:
    data = Letters(PANGRAM, 5)
    fields = data.fetch("eval", [8, 9], FIELDS)  # three targets
    logits = torch.randn(2, 5, 27, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logarithms = logits.log_softmax(-1)
    expected = -sum(logarithms[0, step, int(fields["next_tokens"][0, step])] for step in range(3))
    assert data.loss(logits, fields).item() == pytest.approx(float(expected), rel=1e-12)
    assert data.score(logits, fields)["cross_entropy"].item() == pytest.approx(float(expected), rel=1e-12)
    nothing = data.fetch("eval", [9], FIELDS)
    assert data.loss(logits[:1].requires_grad_(), nothing).item() == 0


def test_perplexity_of_uniform_and_of_certain_predictions() -> None:
    data = Letters(PANGRAM, 5)
    fields = data.fetch("eval", range(9), FIELDS)
    weight = data.weight("eval", range(9))

    def perplexity(logits: torch.Tensor) -> float:
        sums = {name: value.item() for name, value in data.score(logits, fields).items()}
        return data.summarise(sums, weight)["perplexity"]

    assert perplexity(torch.zeros(9, 5, 27)) == pytest.approx(27, rel=1e-5)
    certain = torch.nn.functional.one_hot(fields["next_tokens"].clamp(min=0), 27) * 100.0
    assert perplexity(certain) == pytest.approx(1, rel=1e-5)
    assert perplexity(-100 * certain) == math.inf


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match=r"^letters: bptt is 0, allowed is 1 or more$"):
        Letters(bptt=0)
    with pytest.raises(ValueError, match=r"^letters: split is 'test', allowed are train, eval$"):
        Letters().fetch("test", [0], FIELDS)
    with pytest.raises(ValueError, match=r"^letters: split is 'test', allowed are train, eval$"):
        Letters().weight("test", [0])


def test_vocabulary_is_the_most_frequent_words() -> None:
    words = ["b", "a", "c", "a", "b", "a", "<eos>", "d", "d", "d", "d", "<eos>"]
    assert most_frequent(words, 10) == {"d": 0, "a": 1, "<eos>": 2, "b": 3, "c": 4, "<unk>": 5}
    small = most_frequent(words, 4)
    assert small == {"d": 0, "a": 1, "<eos>": 2, "<unk>": 3}  # b and c make room
    assert encode(["a", "b", "never", "<eos>"], small).tolist() == [1, 3, 3, 2]
    assert most_frequent(["<unk>", "<unk>", "a"], 3) == {"<unk>": 0, "a": 1, "<eos>": 2}
