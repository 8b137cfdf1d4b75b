"""The base of translation data sets: loss, weight, token accuracy, and BLEU of a whole model."""

import sys
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.zoo.text import BOS, EOS, PAD
from pipebench.zoo.translation import Translation, TranslationOptions, copy_baseline

FIELDS = ("source", "source_length", "target_in", "target_out")
WORDS = ["", "", "", "", "eins", "zwei", "drei", "vier", "one", "two", "three", "four"]
ROWS = {
    "source": [[8, 9, 10, 11], [9], [8, 8, 10, 9, 11], [10, 9, 9, 8]],
    "target": [[4, 5, 6, 7], [5], [4, 4, 6, 5, 7], [6, 5, 5, 4]],
}


class Counting(Translation):
    """Four pairs, the same to train on and held out; remembers which sides were read."""

    def __init__(self, label_smoothing: float = 0.1, num_scored: int = 0, columns: int | None = None) -> None:
        super().__init__(
            TranslationOptions(
                "counting", 4, 4, 12, columns, columns,
                typical_columns=(6, 5), max_written=9, label_smoothing=label_smoothing, num_scored=num_scored,
            )
        )  # fmt: skip
        self.read: list[str] = []

    def tokens(self, side: str, split: str, indices: Sequence[int]) -> list[list[int]]:
        self.read.append(side)
        return [ROWS[side][index] for index in indices]

    def held_out(self, side: str, indices: Sequence[int]) -> list[str]:
        return [self.text(ROWS[side][index]) for index in indices]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[i] for i in ids)


class Shifting(nn.Module):
    """Translates by subtracting a number from every id; adds begin, end and padding, as a search may."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(float(shift)))
        self.batches: list[int] = []

    def translate(self, source: torch.Tensor, source_length: torch.Tensor, *, max_length: int) -> list[list[int]]:
        assert not torch.is_grad_enabled()
        self.batches.append(len(source))
        shift = int(self.shift)
        rows = [row[1 : n - 1] - shift for row, n in zip(source, source_length.tolist(), strict=True)]
        return [[BOS, *row.tolist()[:max_length], EOS, PAD] for row in rows]


def logits(indices: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    width = max(len(ROWS["target"][i]) for i in indices) + 1
    generator = torch.Generator().manual_seed(len(indices))
    return torch.randn(len(indices), width, 12, generator=generator, dtype=dtype)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
def test_loss_equals_torch_s_label_smoothing_without_padding(label_smoothing: float) -> None:
    """Against torch's mean over tokens without padding, and against the formula of Szegedy et al., section 7."""
    dataset = Counting(label_smoothing)
    indices = [0, 1, 2, 3]
    targets = dataset.fetch("train", indices, ["target_out"])
    output = logits(indices)
    there = targets["target_out"] != PAD
    mean = functional.cross_entropy(output[there], targets["target_out"][there], label_smoothing=label_smoothing)
    loss = dataset.loss(output, targets)
    assert torch.allclose(loss / dataset.weight("train", indices), mean, rtol=1e-12)
    log = output.log_softmax(-1)
    true = log.gather(-1, targets["target_out"].unsqueeze(-1)).squeeze(-1)
    by_hand = -((1 - label_smoothing) * true + label_smoothing * log.mean(-1))[there].sum()
    assert torch.allclose(loss, by_hand, rtol=1e-12)


def test_loss_of_parts_is_the_loss_of_the_whole() -> None:
    dataset = Counting(columns=8)
    output = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = dataset.loss(output, dataset.fetch("train", range(4), ["target_out"]))
    parts = [dataset.loss(output[i : i + 1], dataset.fetch("train", [i], ["target_out"])) for i in range(4)]
    assert torch.allclose(whole, torch.stack(parts).sum(), rtol=1e-12)
    assert dataset.weight("train", range(4)) == sum(dataset.weight("train", [i]) for i in range(4)) == 18


def test_padding_has_no_gradient() -> None:
    dataset = Counting()
    targets = dataset.fetch("train", [1, 2], ["target_out"])
    output = logits([1, 2]).requires_grad_()
    (gradient,) = torch.autograd.grad(dataset.loss(output, targets), output)
    assert torch.equal(gradient.abs().sum(-1) > 0, targets["target_out"] != PAD)


def test_token_accuracy_ignores_padding() -> None:
    """Of 5 + 2 tokens, all but the second sentence's end are predicted correctly; padding doesn't count."""
    dataset = Counting()
    targets = dataset.fetch("eval", [0, 1], ["target_out"])
    output = functional.one_hot(targets["target_out"], 12).double()
    output[1, 1] = functional.one_hot(torch.tensor(7), 12)
    sums = {name: value.item() for name, value in dataset.score(output, targets).items()}
    assert sums == {"token_accuracy": 6}
    assert dataset.summarise(sums, dataset.weight("eval", [0, 1])) == {"token_accuracy": pytest.approx(6 / 7)}


def test_fetch_is_pure_and_reads_only_requested_fields() -> None:
    dataset = Counting()
    both = dataset.fetch("train", [2, 0], FIELDS)
    assert list(both) == list(FIELDS)
    assert all(torch.equal(both[field], dataset.fetch("train", [2, 0], [field])[field]) for field in FIELDS)
    assert both["source_length"].tolist() == [7, 6]
    for fields, sides in ((["source_length"], ["source"]), (["target_out"], ["target"]), (["target_in"], ["target"])):
        dataset.read.clear()
        assert list(dataset.fetch("train", [1], fields)) == fields
        assert dataset.read == sides
    with pytest.raises(KeyError, match="target_length"):
        dataset.fetch("train", [1], ["target_length"])


def test_fixed_columns_give_every_minibatch_one_shape() -> None:
    dataset = Counting(columns=8)
    for indices in ([1], [2], [0, 3]):
        fields = dataset.fetch("train", indices, FIELDS)
        assert {tuple(fields[name].shape) for name in FIELDS if name != "source_length"} == {(len(indices), 8)}
    assert dataset.example(5)["source"].shape == (5, 8)
    assert Counting().example(5)["source"].shape == (5, 6)
    assert Counting().example(5)["target_in"].shape == (5, 5)


def test_bleu_of_a_model_that_translates() -> None:
    assert Counting().whole_model_metrics(Shifting(4)) == {"bleu": pytest.approx(100)}
    assert Counting().whole_model_metrics(Shifting(3))["bleu"] < 30


def test_sentences_are_translated_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.zoo.translation._SCORED_TOGETHER", 3)
    model = Shifting(4)
    assert Counting().whole_model_metrics(model) == {"bleu": pytest.approx(100)}
    assert model.batches == [3, 1]


def test_only_the_first_num_scored_sentences_are_scored() -> None:
    dataset, model = Counting(num_scored=2), Shifting(4)
    assert dataset.whole_model_metrics(model) == {"bleu": pytest.approx(100)}
    assert model.batches == [2]
    assert dataset.notes()["bleu"].endswith(", first 2 of 4 held-out sentences")


def test_notes_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    assert Counting().notes() == {}


def test_copying_scores_nothing_where_languages_share_no_word() -> None:
    assert copy_baseline(Counting()) < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, allowed is 0 to below 1"),
        ({"num_scored": 5}, r"num_scored is 5, allowed is 0 \(all\) to num_eval, 4"),
        ({"num_scored": -1}, "num_scored is -1"),
        ({"columns": 2}, "source_columns is 2, allowed is 3 or more"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^counting: {message}"):
        Counting(**options)
