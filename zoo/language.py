"""What the language-modelling data sets share: one long text in chunks, cross-entropy, perplexity."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import numpy

from pipebench.zoo import metrics
from pipebench.zoo.late import torch
from pipebench.zoo.options import SPLITS, at_least, check_split
from pipebench.zoo.registry import Dataset

UNKNOWN, END = "<unk>", "<eos>"
NOTHING = -1  # the target where there is none


class Text(Dataset):
    """A text as chunks of `bptt` tokens, each the continuation of the one before it.

    Chunk i holds tokens i * bptt to (i + 1) * bptt, excluded; its targets are the tokens after them. So every token
    but a split's first is predicted exactly once. The last chunk is padded, and so is every chunk after it:
    inputs with token 0, targets with -1.

    `tokens`: [samples, bptt] int64; `next_tokens`: [samples, bptt] int64.

    Attributes:
        name: in the registry, for messages.
        bptt: tokens of a chunk: how far backpropagation through time reaches.
        num_tokens: declared tokens of the splits `train` and `eval`.
        num_ids: how many different ids both fields have: the vocabulary.
    """

    inputs: Sequence[str] = ("tokens",)
    targets: Sequence[str] = ("next_tokens",)
    metrics: Mapping[str, str] = {"perplexity": "min"}
    sequential: bool = True

    def __init__(self, name: str, bptt: int, num_tokens: Mapping[str, int], vocabulary: int) -> None:
        """Declare a text; reads nothing.

        Raises:
            ValueError: bptt or a number of tokens is too small.
        """
        at_least(1, name, bptt=bptt)
        self.name, self.bptt, self.num_tokens = name, bptt, dict(num_tokens)
        self.num_ids = {"tokens": vocabulary, "next_tokens": vocabulary}
        self.num_train, self.num_eval = (math.ceil((num_tokens[split] - 1) / bptt) for split in SPLITS)

    @abstractmethod
    def text(self, split: str) -> torch.Tensor:
        """Return the ids of a split's tokens, [num_tokens[split]] int64; read once, shared, not to be written to."""

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return both fields for `num_samples` chunks on the meta device; the text isn't read."""
        shape = (num_samples, self.bptt)
        return {field: torch.empty(shape, dtype=torch.int64, device="meta") for field in ("tokens", "next_tokens")}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the fields asked for of the chunks at `indices`, in that order; past the end of the text, padding."""
        check_split(self.name, split)
        text = self.text(split)
        starts = torch.as_tensor(indices, dtype=torch.int64).unsqueeze(1) * self.bptt
        positions = starts + torch.arange(self.bptt)
        there = positions < len(text) - 1  # a last token has nothing after it to predict
        here = positions.where(there, 0)
        fetched = {}
        if "tokens" in fields:
            fetched["tokens"] = text[here].where(there, 0)
        if "next_tokens" in fields:
            fetched["next_tokens"] = text[here + 1].where(there, NOTHING)
        return {field: fetched[field] for field in fields}

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the number of targets in the chunks; the text isn't read."""
        check_split(self.name, split)
        last = self.num_tokens[split] - 1
        return float(sum(min(max(last - index * self.bptt, 0), self.bptt) for index in indices))

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy in nats, summed over the targets; output: [samples, bptt, vocabulary] float."""
        self.check_logits(output, "next_tokens")
        labels = targets["next_tokens"].flatten()
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), labels, ignore_index=NOTHING, reduction="sum")

    def score(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the summed cross-entropy in nats, of which `summarise` makes the perplexity."""
        return {"cross_entropy": self.loss(output, targets)}

    def summarise(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the perplexity: e to the mean cross-entropy of the targets; infinite if it exceeds a float."""
        return {"perplexity": metrics.perplexity(sums["cross_entropy"] / weight)}


def most_frequent(words: Iterable[str], size: int) -> dict[str, int]:
    """Return the ids of the `size` most frequent words, given or counted, `<unk>` and `<eos>` always among them.

    Ids go by frequency, then by the alphabet, so that they depend on nothing else.
    """
    counts = Counter(words)
    special = [UNKNOWN, END]
    ordered = sorted((word for word in counts if word not in special), key=lambda word: (-counts[word], word))
    kept = sorted([*special, *ordered[: size - len(special)]], key=lambda word: (-counts[word], word))
    return {word: index for index, word in enumerate(kept)}


def encode(words: Sequence[str], vocabulary: Mapping[str, int]) -> torch.Tensor:
    """Return the ids of the words, [len(words)] int64; words outside the vocabulary have the id of `<unk>`."""
    ids = map(vocabulary.get, words, repeat(vocabulary[UNKNOWN]))
    return torch.from_numpy(numpy.fromiter(ids, numpy.int64, len(words)))
