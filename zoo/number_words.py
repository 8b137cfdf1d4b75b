"""Numbers in English and German words, a translation task without a download: `twenty-one` is `einundzwanzig`.

The grammar is real, the vocabulary small. German swaps tens and units, and writes every number below a million as one
word, so a model must learn an order, and work on pieces of words. The words are from the package num2words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pipebench.zoo import bpe
from pipebench.zoo.late import optional, torch
from pipebench.zoo.options import at_least, check_split
from pipebench.zoo.translation import SIDES, Translation, TranslationOptions

_LANGUAGES = {"source": "en", "target": "de"}
_MOST_NUMBERS = 1_000_000  # from a million on, German needs several words
_LEAST_VOCABULARY = 48  # with fewer tokens, hardly any has two letters


class NumberWords(Translation):
    """English number words and their German ones; fields as in `Translation`, every minibatch of one shape.

    BLEU is computed on characters. On words it would always be 0, since it needs four words in a row, and a German
    number is one word.
    """

    def __init__(self, options: TranslationOptions, numbers: int, split_seed: int) -> None:
        super().__init__(options)
        self._selection = _Selection(numbers, self.num_train, self.num_eval, options.vocabulary, split_seed)

    def check(self) -> None:
        """Raise ImportError if a package is missing, ValueError if a sentence is wider than declared."""
        super().check()
        for side in SIDES:
            columns = getattr(self.options, f"{side}_columns")
            framed = 1 + (side == "source")  # a target has begin or end, a source both
            longest = max(len(row) for rows in _encoded(side, self._selection).values() for row in rows) + framed
            if longest > columns:
                raise ValueError(
                    f"number_words: a {side} has {longest} tokens, set {side}_columns, now {columns}, to that or more"
                )

    def tokens(self, side: str, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the token ids of number words, without begin and end."""
        check_split("number_words", split)
        rows = _encoded(side, self._selection)[split]
        return [rows[index] for index in indices]

    def held_out(self, side: str, indices: Sequence[int]) -> list[str]:
        """Return held-out numbers in the words of the side's language."""
        words = _words(side, self._selection)[self.num_train :]
        return [words[index] for index in indices]

    def text(self, ids: Sequence[int]) -> str:
        """Return the words that tokens spell."""
        return _encoding(self._selection).decode(ids)


def number_words(
    numbers: int = 10_000,
    num_train: int = 4000,
    num_eval: int = 400,
    vocabulary: int = 128,
    source_columns: int = 14,
    target_columns: int = 14,
    label_smoothing: float = 0.1,
    num_scored: int = 0,
    split_seed: int = 0,
) -> NumberWords:
    """Build the data set; reads nothing, and needs no package.

    Args:
        numbers: pairs are drawn from the numbers from 0 to this, excluded; at most a million.
        num_train: numbers to train on; the byte-pair encoding is learnt from their words in both languages.
        num_eval: other numbers, held out.
        vocabulary: most tokens of the shared encoding, the special ones included.
        source_columns: width of `source`; the longest number must fit with begin and end.
        target_columns: width of `target_in` and `target_out`; the longest number must fit with its end.
        label_smoothing: share of the probability that is spread evenly over the vocabulary, from 0 to below 1.
        num_scored: held-out numbers that BLEU is computed on; 0: all.
        split_seed: seed of the draw of numbers, and of the split.
    """
    if not num_train + num_eval <= numbers <= _MOST_NUMBERS:
        raise ValueError(
            f"number_words: numbers is {numbers}, "
            f"allowed is num_train + num_eval = {num_train + num_eval} to {_MOST_NUMBERS}"
        )
    at_least(_LEAST_VOCABULARY, "number_words", vocabulary=vocabulary)
    options = TranslationOptions(
        "number_words", num_train, num_eval, vocabulary, source_columns, target_columns,
        typical_columns=(source_columns, target_columns), max_written=target_columns,
        label_smoothing=label_smoothing, num_scored=num_scored, tokenize="char",
    )  # fmt: skip
    return NumberWords(options, numbers, split_seed)


@dataclass(frozen=True)
class _Selection:
    """All that the drawn numbers and their encoding depend on: a key of caches."""

    numbers: int
    num_train: int
    num_eval: int
    vocabulary: int
    split_seed: int


@lru_cache(maxsize=8)
def _words(side: str, selection: _Selection) -> list[str]:
    """Return the numbers in words, the training numbers first."""
    say = _num2words()
    order = torch.randperm(selection.numbers, generator=torch.Generator().manual_seed(selection.split_seed))
    drawn = order[: selection.num_train + selection.num_eval].tolist()
    return [say(number, lang=_LANGUAGES[side]) for number in drawn]


@lru_cache(maxsize=4)
def _encoding(selection: _Selection) -> bpe.BytePairEncoding:
    texts = [text for side in SIDES for text in _words(side, selection)[: selection.num_train]]
    return bpe.learnt(texts, selection.vocabulary)


@lru_cache(maxsize=8)
def _encoded(side: str, selection: _Selection) -> dict[str, list[list[int]]]:
    encoding = _encoding(selection)
    rows = [encoding.encode(text) for text in _words(side, selection)]
    return {"train": rows[: selection.num_train], "eval": rows[selection.num_train :]}


def _num2words() -> Any:
    with optional("number_words", "num2words"):
        from num2words import num2words
    return num2words
