"""The base of BERT's data sets: pairs of segments, with hidden words to predict, and whether one follows the other.

Devlin et al. (2018), section 3.1. A sample is begin, a segment, end, another segment, end. In half of the samples, the
second segment follows the first in the text; in the others, it is from anywhere else. 15% of the words are to be
predicted: 80% of these are replaced by the mask, 10% by a random word, and 10% stay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipebench.zoo import metrics
from pipebench.zoo.imagenet import generator_of
from pipebench.zoo.late import torch
from pipebench.zoo.options import SPLITS, at_least, check_split
from pipebench.zoo.registry import Dataset
from pipebench.zoo.text import BOS, EOS, NUM_SPECIAL, pad_rows

_FRAME = 3  # tokens of a sample that belong to no segment
_HIDDEN = 0.15  # share of the words that are to be predicted
_MASKED, _OTHER = 0.8, 0.9  # of a draw in [0, 1): below the first, the mask; from there to the second, a random word
NOTHING = -1  # the target of padding


@dataclass(frozen=True)
class SegmentOptions:
    """Declared properties of a data set, so that plans and simulations don't need its text."""

    name: str  # of the data set, for errors
    num_sentences: Mapping[str, int]  # of the splits `train` and `eval`
    vocabulary: int  # number of token ids, special ones included
    mask: int  # the id that takes the place of a hidden word
    columns: int  # width of a sample; segments are cut so that two fit
    sentences: int  # of a segment
    num_eval: int  # held-out samples, the first ones; 0: all

    def __post_init__(self) -> None:
        at_least(_FRAME + 2, self.name, columns=self.columns)
        at_least(1, self.name, sentences=self.sentences)
        at_least(0, self.name, num_eval=self.num_eval)
        at_least(NUM_SPECIAL + 2, self.name, vocabulary=self.vocabulary)
        for split in SPLITS:
            if self.num_samples(split) < 2:
                raise ValueError(
                    f"{self.name}: sentences is {self.sentences}, allowed is less than half of the "
                    f"{self.num_sentences[split]} there are to {split}"
                )
        if self.num_eval > self.num_samples("eval"):
            raise ValueError(
                f"{self.name}: num_eval is {self.num_eval}, allowed is 0 (all) to {self.num_samples('eval')}"
            )

    def num_samples(self, split: str) -> int:
        """Return the number of samples: of sentences at which a segment begins that another one follows."""
        return self.num_sentences[split] - 2 * self.sentences + 1

    @property
    def room(self) -> int:
        """Most tokens of a segment."""
        return (self.columns - _FRAME) // 2

    @property
    def num_hidden(self) -> int:
        """Most words of a sample that are to be predicted."""
        return max(1, round(_HIDDEN * 2 * self.room))


class Segments(Dataset):
    """Pairs of segments, whose sentences subclasses read.

    Sample i begins with sentence i. Its second segment and hidden words are drawn again every time it is trained on;
    held-out samples always stay the same.

    Fields: `tokens` and `segments` [samples, columns] int64, padded on the right; `length` [samples] int64, without
    padding; `positions` [samples, hidden words] int64, padded with 0; `words` [samples, hidden words] int64, padded
    with -1; `follows` [samples] int64, 0 or 1.
    """

    inputs: Sequence[str] = ("tokens", "segments", "length", "positions")
    targets: Sequence[str] = ("words", "follows")
    metrics: Mapping[str, str] = {"nsp_accuracy": "max", "mlm_perplexity": "min"}

    def __init__(self, options: SegmentOptions) -> None:
        self.options = options
        self.num_train = options.num_samples("train")
        self.num_eval = options.num_eval or options.num_samples("eval")
        self.num_ids = {"tokens": options.vocabulary, "segments": 2, "words": options.vocabulary}

    @abstractmethod
    def sentences(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the token ids of sentences of a split, `train` or `eval`; sentence i + 1 follows sentence i."""

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field for `num_samples` samples on the meta device; the text isn't read."""
        text, hidden = (num_samples, self.options.columns), (num_samples, self.options.num_hidden)
        shapes = {"tokens": text, "segments": text, "length": text[:1], "positions": hidden, "words": hidden}
        shapes |= {"follows": text[:1]}
        return {field: torch.empty(shape, dtype=torch.int64, device="meta") for field, shape in shapes.items()}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the fields asked for."""
        check_split(self.options.name, split)
        columns = self.options.columns
        drawn = torch.stack([_drawn(draw if split == "train" else 0, index, 2 + 3 * columns) for index in indices])
        found = self._pairs(split, indices, drawn[:, :2])
        if {"tokens", "positions", "words"} & {*fields}:
            found |= self._hidden(found["tokens"], drawn[:, 2:].view(-1, 3, columns))
        return {field: found[field] for field in fields}

    def _pairs(self, split: str, indices: Sequence[int], drawn: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields before words are hidden; drawn: [samples, 2] in [0, 1)."""
        size, total, room = self.options.sentences, self.options.num_samples(split), self.options.room
        follows = drawn[:, 0] < 0.5
        # Any sentence but the one that follows. Second segments begin at sentences `size` to total + size - 1.
        others = (torch.tensor(indices) + 1 + (drawn[:, 1] * (total - 1)).long()) % total + size
        seconds = torch.where(follows, torch.tensor(indices) + size, others).tolist()
        starts = [start for pair in zip(indices, seconds, strict=True) for start in pair]
        read = self.sentences(split, [start + offset for start in starts for offset in range(size)])
        joined = [[token for row in read[at : at + size] for token in row][:room] for at in range(0, len(read), size)]
        pairs = list(zip(joined[::2], joined[1::2], strict=True))
        return {
            "tokens": pad_rows([[BOS, *a, EOS, *b, EOS] for a, b in pairs], self.options.columns),
            "segments": pad_rows([[0] * (len(a) + 2) + [1] * (len(b) + 1) for a, b in pairs], self.options.columns),
            "length": torch.tensor([len(a) + len(b) + _FRAME for a, b in pairs]),
            "follows": follows.long(),
        }

    def _hidden(self, tokens: torch.Tensor, drawn: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of hidden words, and `tokens` without them; drawn: [samples, 3, columns] in [0, 1)."""
        is_word = tokens >= NUM_SPECIAL
        num_words = is_word.sum(1)
        num_hidden = (num_words * _HIDDEN).round().long().clamp(min=1).minimum(num_words).unsqueeze(1)
        order = drawn[:, 0].masked_fill(~is_word, -1).topk(self.options.num_hidden, dim=1).indices
        is_hidden = torch.arange(self.options.num_hidden) < num_hidden
        words, how, which = tokens.gather(1, order), drawn[:, 1].gather(1, order), drawn[:, 2].gather(1, order)
        any_word = NUM_SPECIAL + (which * (self.options.vocabulary - NUM_SPECIAL)).long()
        put = words.where(how >= _OTHER, any_word).masked_fill(how < _MASKED, self.options.mask).where(is_hidden, words)
        return {
            "tokens": tokens.scatter(1, order, put),
            "positions": order.where(is_hidden, 0),
            "words": words.where(is_hidden, NOTHING),
        }

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropies of both tasks, summed over samples.

        `output` is a pair of logits: [samples, hidden words, vocabulary] and [samples, 2]. Differs: of a sample's
        hidden words the mean counts, so that a sample has the same weight in every minibatch. In BERT, all hidden words
        of a minibatch have the same weight.
        """
        words, follows = output
        self.check_logits(words, "words")
        num_words = (targets["words"] != NOTHING).sum(1).clamp(min=1)
        of_words = (_of_words(words, targets["words"]).sum(1) / num_words).sum()
        return of_words + torch.nn.functional.cross_entropy(follows, targets["follows"], reduction="sum")

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the number of samples predicted correctly, the cross-entropy of hidden words, and their number."""
        words, follows = output
        return {
            "nsp_accuracy": (follows.argmax(1) == targets["follows"]).sum(),
            "cross_entropy": _of_words(words, targets["words"]).sum(),
            "num_words": (targets["words"] != NOTHING).sum(),
        }

    def summarise(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the share of samples predicted correctly, and the perplexity of all hidden words."""
        perplexity = metrics.perplexity(sums["cross_entropy"] / max(sums["num_words"], 1))
        return {"nsp_accuracy": sums["nsp_accuracy"] / weight, "mlm_perplexity": perplexity}


def _of_words(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of every hidden word, 0 for padding: [samples, hidden words]."""
    cross_entropy = torch.nn.functional.cross_entropy
    found = cross_entropy(logits.flatten(0, 1), words.flatten(), ignore_index=NOTHING, reduction="none")
    return found.view(words.shape)


def _drawn(draw: int, index: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=generator_of(draw, index), dtype=torch.float64)
