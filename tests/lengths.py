"""Texts of many lengths, padded to the longest of a minibatch, and models whose outputs padding doesn't change."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipebench.zoo.measures import COUNTS, LOSSES, METRICS, Measure
from pipebench.zoo.plain import DatasetPair

_IDS, _WIDTH, _CLASSES = 9, 6, 4


class Texts(torch.utils.data.Dataset[Any]):
    """Random texts of 2 to 9 tokens, the next of which is seldom as long, with random labels."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 10, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, _IDS, (length,), generator=generator) for length in lengths]
        self.labels = torch.randint(_CLASSES, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        return self.texts[index], self.labels[index]

    def collate_fn(self, samples: Sequence[Any]) -> Any:
        """Return ids [samples, longest], padded with 0, and labels [samples]."""
        ids = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
        return ids, torch.tensor([label for _, label in samples])


class LabelledTokens(Texts):
    """Texts with a label for some tokens, which are others in every minibatch; every fifth text has none."""

    def __getitem__(self, index: int) -> Any:
        text = self.texts[index]
        return text, torch.where(torch.rand(len(text)) < (0.5 if index % 5 else 0.0), text % _CLASSES, -100)

    def collate_fn(self, samples: Sequence[Any]) -> Any:
        """Return ids [samples, longest], padded with 0, and labels [samples, longest], -100 where there is none."""
        ids, labels = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad([*ids], batch_first=True), pad([*labels], batch_first=True, padding_value=-100)


def token_mean(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the labels, NaN without any, as torch has it."""
    return functional.cross_entropy(output.transpose(1, 2), labels)


def masked_mean(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return `token_mean` as a quotient, whose gradient without labels is NaN, too."""
    each, mask = functional.cross_entropy(output.transpose(1, 2), labels, reduction="none"), labels != -100
    return (each * mask).sum() / mask.sum()


def labelled_tokens(loss: Measure = token_mean, loader_processes: int = 0) -> DatasetPair:
    """Return texts whose loss is a mean over labels, the last minibatch of 4 of an epoch a short one."""
    train, held_out = LabelledTokens(46, 1), LabelledTokens(10, 2)
    return DatasetPair(train, held_out, loss, {}, loader_processes, count=COUNTS["labels"])


def texts() -> DatasetPair:
    """Return texts, the last minibatch of 4 of an epoch a short one."""
    return DatasetPair(Texts(46, 1), Texts(10, 2), LOSSES["cross_entropy"], {"top1": METRICS["top1"]})


class Reader(nn.Module):
    """Attends over a text's own tokens, then takes the mean over them; double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.embedding = nn.Embedding(_IDS, _WIDTH)
        self.query, self.value, self.out = (nn.Linear(_WIDTH, width) for width in (_WIDTH, _WIDTH, _CLASSES))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens], 0 for padding, to [samples, classes]."""
        hidden, is_own = self.read(ids)
        return self.out(hidden.sum(1) / is_own.sum(1, keepdim=True))

    def read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features [samples, tokens, width], 0 for padding, and which tokens are a text's own."""
        is_own = ids > 0
        hidden = self.embedding(ids)
        # Without views: behind a cut, a view and what it is of are two tensors.
        own_keys, own_rows = (torch.stack([is_own], dimension) for dimension in (1, 2))
        scores = torch.einsum("sid,sjd->sij", self.query(hidden), hidden).masked_fill(~own_keys, -torch.inf)
        return torch.tanh(self.value(scores.softmax(2) @ hidden)) * own_rows, is_own


class Tagger(Reader):
    """A `Reader` that classifies every token."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens], 0 for padding, to [samples, tokens, classes]."""
        return self.out(self.read(ids)[0])
