"""The base of captioning data sets, on two clips that can be counted by hand."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pipebench.zoo.captions import Captions, Vocabulary
from pipebench.zoo.meteor import SIGNATURE, meteor
from pipebench.zoo.text import BOS, EOS, PAD, UNK

A, B, C = 4, 5, 6


class Two(Captions):
    """Three training captions, two held-out clips."""

    frames, num_features, words = 2, 3, 4
    num_train, num_eval = 3, 2

    def __init__(self) -> None:
        self.read: list[str] = []

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(["a", "b", "c"])

    def features(self, split: str, indices: Sequence[int]) -> torch.Tensor:
        self.read.append("features")
        return torch.tensor(indices, dtype=torch.float32)[:, None, None].expand(-1, 2, 3).clone()

    def captions(self, split: str, indices: Sequence[int]) -> list[list[str]]:
        self.read.append("captions")
        found = {"train": ["a b", "c", "a b"], "eval": ["a b c a b c", "b strange"]}[split]
        return [found[index].split() for index in indices]

    def references(self, indices: Sequence[int]) -> list[list[list[str]]]:
        both = [[["a", "b", "c", "a", "b", "c"], ["a"]], [["b", "strange"]]]
        return [both[index] for index in indices]


class Writer(nn.Module):
    """Writes given captions, clip by clip: a clip's features are its index."""

    def __init__(self, captions: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.captions = captions
        self.scale = nn.Parameter(torch.ones(()))

    def describe(self, features: torch.Tensor, *, max_length: int) -> list[list[int]]:
        assert max_length == Two.words
        return [list(self.captions[int(frames[0, 0])]) for frames in features]


def test_vocabulary() -> None:
    words = Vocabulary(["b", "a"])
    assert len(words) == 6
    assert words.encode(["a", "b", "c"]) == [5, 4, UNK]
    assert words.decode([5, 4, UNK, 99]) == ["a", "b", "<unk>", "<unk>"]


def test_captions_begin_end_and_are_cut() -> None:
    fields = Two().fetch("eval", [1, 0], ["caption_in", "caption_out"])
    assert fields["caption_in"].tolist() == [[BOS, B, UNK, PAD], [BOS, A, B, C]]
    assert fields["caption_out"].tolist() == [[B, UNK, EOS, PAD], [A, B, C, EOS]]
    assert fields["caption_in"].dtype == torch.int64


@pytest.mark.parametrize(
    ("fields", "read"), [(["features"], ["features"]), (["caption_out"], ["captions"]), (["caption_in"], ["captions"])]
)
def test_only_requested_fields_are_read(fields: list[str], read: list[str]) -> None:
    dataset = Two()
    assert list(dataset.fetch("train", [0], fields)) == fields
    assert dataset.read == read


def test_fields_match_the_example() -> None:
    dataset = Two()
    example = dataset.example(3)
    assert list(example) == [*dataset.inputs, *dataset.targets]
    for field, value in dataset.fetch("train", [0, 1, 2], list(example)).items():
        assert (value.shape, value.dtype) == (example[field].shape, example[field].dtype)
        assert example[field].is_meta


def test_loss_weight_and_accuracy_count_words_with_their_ends() -> None:
    dataset = Two()
    targets = dataset.fetch("eval", [0, 1], ["caption_out"])
    assert dataset.weight("eval", [0, 1]) == 4 + 3
    assert dataset.weight("train", [0, 1, 2]) == 3 + 2 + 3
    uniform = torch.zeros(2, 4, 7)
    assert dataset.loss(uniform, targets).item() == pytest.approx(7 * torch.tensor(7.0).log().item())
    logits = uniform.clone()
    logits[:, :, B] = 1  # right for the second word of the first caption and for the first word of the second
    assert dataset.score(logits, targets)["token_accuracy"].item() == 2
    logits[:, :, PAD] = 2
    assert dataset.score(logits, targets)["token_accuracy"].item() == 0


def test_padding_has_no_gradient() -> None:
    dataset = Two()
    logits = torch.zeros(1, 4, 7, requires_grad=True)
    dataset.loss(logits, dataset.fetch("eval", [1], ["caption_out"])).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0].abs().sum(1).gt(0).tolist() == [True, True, True, False]


def test_meteor_of_the_model_s_captions() -> None:
    dataset = Two()
    written = dataset.whole_model_metrics(Writer([[A, B, C], [B, UNK]]))
    expected = meteor([["a", "b", "c"], ["b", "<unk>"]], dataset.references([0, 1]))
    assert written == {"meteor": pytest.approx(expected)}
    assert written["meteor"] < dataset.whole_model_metrics(Writer([[A, B, C, A, B, C], [B, UNK]]))["meteor"]
    assert set(dataset.metrics) == {"meteor", "token_accuracy"}
    assert dataset.notes() == {"meteor": SIGNATURE}


def test_more_clips_than_one_batch_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Two().whole_model_metrics(Writer([[A], [B]]))
    monkeypatch.setattr("pipebench.zoo.captions._CLIPS_AT_ONCE", 1)
    assert Two().whole_model_metrics(Writer([[A], [B]])) == together


def test_majority_baseline() -> None:
    """`a b` is the commonest training caption; `c` alone scores less."""
    dataset = Two()
    expected = meteor([["a", "b"]] * 2, dataset.references([0, 1]))
    assert dataset.majority_baseline() == expected
    assert meteor([["c"]] * 2, dataset.references([0, 1])) < expected
