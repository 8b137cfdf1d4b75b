"""GNMT as MLPerf trained it, in the order and granularity of the PipeDream artifact's profile: eight LSTM layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support import Blobs

VOCABULARY, WIDTH = 32320, 1024
LEAVES = ("EmuBidirLSTM", "RecurrentAttention", "Classifier")


class EmuBidirLSTM(nn.Module):
    """A bidirectional LSTM as two: the second reads every sentence from its last word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.LSTM(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Map [words, sentences, width] to [words, sentences, 2 width]."""
        position = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        index = torch.where(position < lengths, lengths - 1 - position, position).unsqueeze(2).expand_as(x)
        mask = (position < lengths).unsqueeze(2).to(x.dtype)
        there, _ = self.layer1(x)
        back, _ = self.layer2(x.gather(0, index))
        return torch.cat((there * mask, back.gather(0, index)), 2)


class RecurrentAttention(nn.Module):
    """An LSTM and Bahdanau's attention over all words of the source at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.linear_q, self.linear_k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear_att = nn.Parameter(torch.ones(WIDTH))
        self.normalize_scalar = nn.Parameter(torch.ones(1))
        self.normalize_bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map [target words, sentences, width] to that, to the context for each, and to the scores."""
        x, _ = self.rnn(x)
        keys = context.transpose(0, 1)
        query, projected = self.linear_q(x.transpose(0, 1)), self.linear_k(keys)
        energy = torch.tanh(query.unsqueeze(2) + projected.unsqueeze(1) + self.normalize_bias)
        direction = self.linear_att / self.linear_att.norm() * self.normalize_scalar
        mask = torch.arange(context.shape[0], device=x.device) >= lengths.unsqueeze(1)
        scores = functional.softmax(energy.matmul(direction).masked_fill(mask.unsqueeze(1), -65504.0), -1)
        return x, torch.bmm(scores, keys).transpose(0, 1), scores


class Classifier(nn.Module):
    """The product with the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [target words, sentences, width] to logits."""
        logits: torch.Tensor = self.classifier(x)
        return logits


class Gnmt(nn.Module):
    """The translator: `num_layers` LSTM layers, half of them in the encoder."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        half = num_layers // 2
        self.dropout = nn.Dropout(0.2)
        self.source_embedder = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.bidirectional = EmuBidirLSTM()
        self.encoder = nn.ModuleList(nn.LSTM(2 * WIDTH if i == 0 else WIDTH, WIDTH) for i in range(half - 1))
        self.target_embedder = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.attention = RecurrentAttention()
        self.decoder = nn.ModuleList(nn.LSTM(2 * WIDTH, WIDTH) for _ in range(half - 1))
        self.classifier = Classifier()

    def forward(self, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Map [words, sentences] of both languages to logits."""
        x = self.dropout(self.bidirectional(self.source_embedder(source), lengths))
        x = self.encoder[0](x)[0]
        for lstm in list(self.encoder)[1:]:
            x = lstm(self.dropout(x))[0] + x
        y, attended, _ = self.attention(self.target_embedder(target), x, lengths)
        y = self.decoder[0](torch.cat((self.dropout(y), attended), 2))[0]
        for lstm in list(self.decoder)[1:]:
            y = lstm(torch.cat((self.dropout(y), attended), 2))[0] + y
        logits: torch.Tensor = self.classifier(y)
        return logits


class Sentences(Blobs):
    """Translation's shapes, no data. A sample is a sentence; all are of one length."""

    inputs: Sequence[str] = ("source", "lengths", "target")

    def __init__(self, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source_words, self.target_words = source_words, target_words

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return meta tensors."""

        def words(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device="meta")

        return {
            "source": words(self.source_words, num_samples),
            "lengths": words(num_samples),
            "target": words(self.target_words, num_samples),
            "label": words(self.target_words * num_samples),
        }

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return summed cross-entropy."""
        return functional.cross_entropy(output.flatten(0, 1), targets["label"], reduction="sum")
