"""Numbers in English and German words, a translation task without a download: `twenty-one` is `einundzwanzig`.

The grammar is real, the vocabulary small. German swaps tens and units, and writes every number below a million as one
word, so a model must learn an order, and work on pieces of words. The words are from the package num2words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pipebench.zoo.late import optional, torch
from pipebench.zoo.options import at_least
from pipebench.zoo.translation import SIDES, Selection, SmallTranslation, TranslationOptions, encoded

_MOST_NUMBERS = 1_000_000  # from a million on, German needs several words
_LEAST_VOCABULARY = 48  # with fewer tokens, hardly any has two letters


class NumberWords(SmallTranslation):
    """English number words and their German ones; fields as in `Translation`, every minibatch of one shape.

    BLEU is computed on characters. On words it would always be 0, since it needs four words in a row, and a German
    number is one word.
    """

    def __init__(self, options: TranslationOptions, numbers: int, split_seed: int) -> None:
        super().__init__(options)
        self._selection = _Selection(self.num_train, self.num_eval, options.vocabulary, split_seed, numbers)

    def check(self) -> None:
        """Raise ImportError if a package is missing, ValueError if a sentence is wider than declared."""
        super().check()
        for side in SIDES:
            columns = getattr(self.options, f"{side}_columns")
            framed = 1 + (side == "source")  # a target has begin or end, a source both
            longest = max(len(row) for rows in encoded(side, self._selection).values() for row in rows) + framed
            if longest > columns:
                raise ValueError(
                    f"number_words: a {side} has {longest} tokens, set {side}_columns, now {columns}, to that or more"
                )

    def selection(self) -> Selection:
        """Return the drawn numbers."""
        return self._selection


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
class _Selection(Selection):
    numbers: int

    def pairs(self) -> dict[str, list[tuple[str, str]]]:
        return _pairs(self)


@lru_cache(maxsize=4)
def _pairs(selection: _Selection) -> dict[str, list[tuple[str, str]]]:
    with optional("number_words", "num2words"):
        from num2words import num2words
    order = torch.randperm(selection.numbers, generator=torch.Generator().manual_seed(selection.split_seed))
    drawn = order[: selection.num_train + selection.num_eval].tolist()
    pairs = [(num2words(number, lang="en"), num2words(number, lang="de")) for number in drawn]
    return {"train": pairs[: selection.num_train], "eval": pairs[selection.num_train :]}
