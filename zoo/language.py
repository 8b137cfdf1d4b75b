"""The base of language-modelling data sets: one long text in chunks, cross-entropy, perplexity."""

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
NOTHING = -1  # the target of padding


class Text(Dataset):
    """A text as chunks of `bptt` tokens, each of which continues the one before it.

    Chunk i has the tokens [i * bptt, (i + 1) * bptt); its targets are the tokens after these. So every token but a
    split's first is predicted exactly once. The last chunk is padded, and chunks after it are padding only: inputs with
    token 0, targets with -1.

    Fields: `tokens` and `next_tokens`, both [samples, bptt] int64.

    Attributes:
        name: in the registry, for errors.
        bptt: tokens of a chunk, through which backpropagation through time reaches.
        num_tokens: declared numbers of tokens of the splits `train` and `eval`.
        num_ids: the vocabulary's size, for both fields.
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
        """Return the ids of a split's tokens, [num_tokens[split]] int64. Callers must not change the tensor."""

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return both fields for `num_samples` chunks on the meta device; the text isn't read."""
        shape = (num_samples, self.bptt)
        return {field: torch.empty(shape, dtype=torch.int64, device="meta") for field in ("tokens", "next_tokens")}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of the chunks at `indices`, in that order; chunks after the text's end are padding."""
        check_split(self.name, split)
        text = self.text(split)
        starts = torch.as_tensor(indices, dtype=torch.int64).unsqueeze(1) * self.bptt
        positions = starts + torch.arange(self.bptt)
        there = positions < len(text) - 1  # the last token has no next one to predict
        here = positions.where(there, 0)
        found = {}  # the first stage asks for one field, the last for the other
        if "tokens" in fields:
            found["tokens"] = text[here].where(there, 0)
        if "next_tokens" in fields:
            found["next_tokens"] = text[here + 1].where(there, NOTHING)
        return {field: found[field] for field in fields}

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the number of targets in the chunks, padding left out; the text isn't read."""
        check_split(self.name, split)
        last = self.num_tokens[split] - 1
        return float(sum(min(max(last - index * self.bptt, 0), self.bptt) for index in indices))

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy in nats, summed over the targets; output: [samples, bptt, vocabulary] float."""
        self.check_logits(output, "next_tokens")
        return metrics.token_cross_entropy(output, targets["next_tokens"], NOTHING)

    def score(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the summed cross-entropy in nats, from which `summarise` computes the perplexity."""
        return {"cross_entropy": self.loss(output, targets)}

    def summarise(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the perplexity: e to the power of the mean cross-entropy of the targets."""
        return {"perplexity": metrics.perplexity(sums["cross_entropy"] / weight)}


def most_frequent(words: Iterable[str], size: int) -> dict[str, int]:
    """Return the ids of the `size` most frequent words; `<unk>` and `<eos>` are always among them.

    Ids are in order of frequency, then in alphabetical order. `words` are a text, or a `Counter` of its words.
    """
    counts = Counter(words)
    special = [UNKNOWN, END]
    ordered = sorted((word for word in counts if word not in special), key=lambda word: (-counts[word], word))
    chosen = sorted([*special, *ordered[: size - len(special)]], key=lambda word: (-counts[word], word))
    return {word: index for index, word in enumerate(chosen)}


def encode(words: Sequence[str], vocabulary: Mapping[str, int]) -> torch.Tensor:
    """Return the ids of the words, [len(words)] int64; other words than the vocabulary's have the id of `<unk>`."""
    ids = map(vocabulary.get, words, repeat(vocabulary[UNKNOWN]))
    return torch.from_numpy(numpy.fromiter(ids, numpy.int64, len(words)))
