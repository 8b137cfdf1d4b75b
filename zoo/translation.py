"""The base of translation data sets: fields, padding, the label-smoothed loss, token accuracy and BLEU.

A sentence pair is two lists of token ids, to which begin and end are added as in MLPerf's GNMT. A source is begin,
tokens, end. The decoder reads begin and the target's tokens, and predicts the tokens and end.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pipebench.zoo import bleu, bpe, metrics
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least, below_one, check_split
from pipebench.zoo.registry import Dataset
from pipebench.zoo.text import BOS, EOS, PAD, content, pad_rows

SIDES = ("source", "target")
_SCORED_TOGETHER = 64  # sentences translated at a time, which bounds memory and changes no translation


@dataclass(frozen=True)
class TranslationOptions:
    """Declared properties of a translation data set, so that plans and simulations don't need its files."""

    name: str  # of the data set, for errors
    num_train: int  # sentence pairs to train on
    num_eval: int  # held-out pairs
    vocabulary: int  # number of token ids, the special ones included; one vocabulary for both languages
    source_columns: int | None  # width of `source`, begin and end included; None: that of a minibatch's longest
    target_columns: int | None  # width of `target_in` and `target_out`; None: that of a minibatch's longest
    typical_columns: tuple[int, int]  # widths of source and target in profiles, if they vary
    max_written: int  # most tokens of a translation
    # Share of the probability that is spread evenly over the vocabulary (Szegedy et al., CVPR 2016, section 7).
    label_smoothing: float
    num_scored: int  # held-out sentences that BLEU is computed on, the first ones; 0: all
    tokenize: str = "13a"  # how BLEU splits sentences into tokens
    lowercase: bool = False  # whether BLEU ignores case

    def __post_init__(self) -> None:
        at_least(1, self.name, num_train=self.num_train, num_eval=self.num_eval)
        columns = {"source_columns": self.source_columns, "target_columns": self.target_columns}
        at_least(3, self.name, **{option: width for option, width in columns.items() if width is not None})
        at_least(8, self.name, vocabulary=self.vocabulary)
        below_one(self.name, label_smoothing=self.label_smoothing)
        if not 0 <= self.num_scored <= self.num_eval:
            raise ValueError(
                f"{self.name}: num_scored is {self.num_scored}, allowed is 0 (all) to num_eval, {self.num_eval}"
            )


class Translation(Dataset):
    """Sentence pairs, which subclasses read.

    Fields: `source` [samples, columns] int64: begin, tokens, end, padding; `source_length` [samples] int64: the number
    of columns without padding; `target_in` [samples, columns] int64: begin, tokens, padding; and `target_out` [samples,
    columns] int64: tokens, end, padding.
    """

    inputs: Sequence[str] = ("source", "source_length", "target_in")
    targets: Sequence[str] = ("target_out",)
    metrics: Mapping[str, str] = {"bleu": "max", "token_accuracy": "max"}
    generates_with: str | None = "translate"

    def __init__(self, options: TranslationOptions) -> None:
        self.options = options
        self.num_train, self.num_eval = options.num_train, options.num_eval
        self.num_ids = dict.fromkeys(("source", "target_in", "target_out"), options.vocabulary)

    def check(self) -> None:
        """Raise ImportError, with one readable sentence, if the package that computes BLEU is missing.

        Subclasses call it first.
        """
        bleu.signature(tokenize=self.options.tokenize, lowercase=self.options.lowercase)

    @abstractmethod
    def tokens(self, side: str, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the token ids of pairs' `source` or `target` sentences, in this order, without begin and end."""

    @abstractmethod
    def held_out(self, side: str, indices: Sequence[int]) -> list[str]:
        """Return held-out sentences as people write them; of the target's side, BLEU's references."""

    @abstractmethod
    def text(self, ids: Sequence[int]) -> str:
        """Return the target sentence of these tokens, as people write it."""

    def target_lengths(self, split: str, indices: Sequence[int]) -> list[int]:
        """Return the number of tokens of target sentences, without begin and end."""
        return [len(row) for row in self.tokens("target", split, indices)]

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field for `num_samples` samples on the meta device; the data isn't read."""
        typical_source, typical_target = self.options.typical_columns
        source = (num_samples, self.options.source_columns or typical_source)
        target = (num_samples, self.options.target_columns or typical_target)
        shapes = {"source": source, "source_length": (num_samples,), "target_in": target, "target_out": target}
        return {field: torch.empty(shape, dtype=torch.int64, device="meta") for field, shape in shapes.items()}

    def of_length(self, columns: int) -> Translation:
        """Return this data set with examples whose sides are both so wide."""
        made = copy.copy(self)
        made.options = replace(self.options, typical_columns=(columns, columns))
        return made

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of samples; a side of the pairs that no field needs isn't read."""
        read = {
            side: self.tokens(side, split, indices) for side in SIDES if any(name.startswith(side) for name in fields)
        }
        return {field: self._field(field, read) for field in fields}

    def _field(self, field: str, read: Mapping[str, list[list[int]]]) -> torch.Tensor:
        if field == "source":
            return pad_rows([[BOS, *row, EOS] for row in read["source"]], self.options.source_columns)
        if field == "source_length":
            return torch.tensor([len(row) + 2 for row in read["source"]], dtype=torch.int64)
        if field == "target_in":
            return pad_rows([[BOS, *row] for row in read["target"]], self.options.target_columns)
        if field == "target_out":
            return pad_rows([[*row, EOS] for row in read["target"]], self.options.target_columns)
        raise KeyError(field)

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the number of target tokens, ends included, padding left out."""
        return float(sum(self.target_lengths(split, indices)) + len(indices))

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the label-smoothed cross-entropy summed over target tokens; output: [samples, columns, vocabulary]."""
        self.check_logits(output, "target_out")
        return metrics.token_cross_entropy(output, targets["target_out"], PAD, self.options.label_smoothing)

    def score(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `token_accuracy`: the number of target tokens predicted correctly, given the tokens before them."""
        wanted = targets["target_out"]
        return {"token_accuracy": ((output.argmax(-1) == wanted) & (wanted != PAD)).sum()}

    def whole_model_metrics(self, model: torch.nn.Module) -> dict[str, float]:
        """Return `bleu`, 0 to 100, of the model's translations of held-out sentences."""
        return {"bleu": self.bleu([self.text(ids) for ids in self._translations(model)])}

    def bleu(self, hypotheses: Sequence[str]) -> float:
        """Return BLEU, 0 to 100, of translations of the held-out sentences that are scored, in order."""
        references = self.held_out("target", self._scored())
        settings: dict[str, Any] = {"tokenize": self.options.tokenize, "lowercase": self.options.lowercase}
        return bleu.corpus_bleu(hypotheses, references, **settings)

    def notes(self) -> dict[str, str]:
        """Return sacrebleu's signature of BLEU, and the number of sentences; nothing without sacrebleu."""
        try:
            signature = bleu.signature(tokenize=self.options.tokenize, lowercase=self.options.lowercase)
        except ImportError:  # only in simulations, which compute no BLEU: otherwise `check` has failed
            return {}
        return {"bleu": f"{signature}, first {len(self._scored())} of {self.num_eval} held-out sentences"}

    def _scored(self) -> range:
        return range(self.options.num_scored or self.num_eval)

    def _translations(self, model: torch.nn.Module) -> Iterator[list[int]]:
        device = next(model.parameters()).device
        scored = self._scored()
        translate: Any = getattr(model, str(self.generates_with))
        for start in range(0, len(scored), _SCORED_TOGETHER):
            fields = self.fetch("eval", scored[start : start + _SCORED_TOGETHER], ["source", "source_length"])
            source, length = fields["source"].to(device), fields["source_length"].to(device)
            with torch.no_grad():
                written = translate(source, length, max_length=self.options.max_written)
            yield from (content(ids) for ids in written)


@dataclass(frozen=True)
class Selection(ABC):
    """All that the pairs of a small text and their encoding depend on: a key of caches."""

    num_train: int
    num_eval: int
    vocabulary: int  # most tokens of the encoding, the special ones included
    split_seed: int

    @abstractmethod
    def pairs(self) -> dict[str, list[tuple[str, str]]]:
        """Return the sentence pairs of each split."""


class SmallTranslation(Translation):
    """Sentence pairs that fit into memory, in one byte-pair encoding, learnt from both sides of those to train on."""

    @abstractmethod
    def selection(self) -> Selection:
        """Return which pairs these are."""

    def tokens(self, side: str, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the token ids of sentences, without begin and end."""
        check_split(self.options.name, split)
        rows = encoded(side, self.selection())[split]
        return [rows[index] for index in indices]

    def held_out(self, side: str, indices: Sequence[int]) -> list[str]:
        """Return held-out sentences."""
        pairs = self.selection().pairs()["eval"]
        return [pairs[index][SIDES.index(side)] for index in indices]

    def text(self, ids: Sequence[int]) -> str:
        """Return the sentence that tokens spell."""
        return encoding(self.selection()).decode(ids)


@lru_cache(maxsize=4)
def encoding(selection: Selection) -> bpe.BytePairEncoding:
    """Return the encoding of a selection's pairs."""
    train = selection.pairs()["train"]
    return bpe.learnt([pair[side] for side in range(len(SIDES)) for pair in train], selection.vocabulary)


@lru_cache(maxsize=8)
def encoded(side: str, selection: Selection) -> dict[str, list[list[int]]]:
    """Return the token ids of one side of every pair, by split."""
    learnt, index = encoding(selection), SIDES.index(side)
    return {split: [learnt.encode(pair[index]) for pair in pairs] for split, pairs in selection.pairs().items()}


def copy_baseline(dataset: Translation) -> float:
    """Return BLEU, 0 to 100, of held-out sentences that are left untranslated: a baseline for scores."""
    return dataset.bleu(dataset.held_out("source", dataset._scored()))
