"""Penn Treebank for language models: Mikolov's text of 10,000 different words, from three files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pipebench.zoo.language import END, Text, encode, most_frequent
from pipebench.zoo.late import torch
from pipebench.zoo.line_index import fingerprint
from pipebench.zoo.options import at_least, one_of
from pipebench.zoo.places import DATA_VARIABLE, data_folder

# Tokens, with one <eos> per line, and words of the usual files ptb.{train,valid,test}.txt.
TRAIN_TOKENS, VALID_TOKENS, TEST_TOKENS = 929_589, 73_760, 82_430
VOCABULARY = 10_000
_SPLITS = ("train", "valid", "test")
_BLOCK_LETTERS = 1 << 20


class PennTreebank(Text):
    """The training text and one of the held-out texts; ids are 0 to vocabulary - 1, in order of frequency."""

    def __init__(self, root: str, bptt: int, tokens: dict[str, int], vocabulary: int, evaluate_on: str) -> None:
        super().__init__("ptb", bptt, {"train": tokens["train"], "eval": tokens[evaluate_on]}, vocabulary)
        self.root = root
        self.file_tokens, self.vocabulary, self.evaluate_on = tokens, vocabulary, evaluate_on

    def check(self) -> None:
        """Raise an exception, with one readable sentence, if the files aren't what the options say.

        Raises:
            FileNotFoundError: no folder is given, or a file isn't there.
            ValueError: another number of tokens or of words than declared.
        """
        folder = data_folder(self.name, self.root, "ptb.train.txt, ptb.valid.txt and ptb.test.txt")
        missing = [_file(folder, split) for split in _SPLITS if not _file(folder, split).is_file()]
        if missing:
            raise FileNotFoundError(
                f"ptb: there is no file {missing[0]}; expected are ptb.train.txt, ptb.valid.txt and ptb.test.txt in a "
                f"folder that dataset.root names, or in the folder ptb of the one that {DATA_VARIABLE} names"
            )
        counts = {split: _counts(*_place(folder, split)) for split in _SPLITS}
        for split, declared in self.file_tokens.items():
            found = counts[split].total()
            if found != declared:
                raise ValueError(
                    f"ptb: {_file(folder, split)} has {found} tokens with one {END} per line, expected are "
                    f"{declared}; for another text set dataset.{split}_tokens"
                )
        words = len(counts["train"])
        if words != self.vocabulary:
            raise ValueError(
                f"ptb: {_file(folder, 'train')} has {words} different words with {END}, expected are "
                f"{self.vocabulary}; for another text set dataset.vocabulary"
            )

    def text(self, split: str) -> torch.Tensor:
        """Return the ids of a split's tokens, [num_tokens[split]] int64."""
        return _text(
            data_folder(self.name, self.root), "train" if split == "train" else self.evaluate_on, self.vocabulary
        )


def ptb(
    root: str = "",
    bptt: int = 70,
    evaluate_on: str = "valid",
    train_tokens: int = TRAIN_TOKENS,
    valid_tokens: int = VALID_TOKENS,
    test_tokens: int = TEST_TOKENS,
    vocabulary: int = VOCABULARY,
) -> PennTreebank:
    """Build the data set; reads nothing.

    Args:
        root: folder of the three files; empty: `ptb` in the folder that PIPEBENCH_DATA names.
        bptt: tokens of a chunk; 70 is Merity's (2018).
        evaluate_on: `valid` or `test`.
        train_tokens: tokens of ptb.train.txt, one `<eos>` per line included.
        valid_tokens: the same of ptb.valid.txt.
        test_tokens: the same of ptb.test.txt.
        vocabulary: different words of ptb.train.txt, `<eos>` included.
    """
    one_of(_SPLITS[1:], "ptb", evaluate_on=evaluate_on)
    tokens = {"train": train_tokens, "valid": valid_tokens, "test": test_tokens}
    at_least(2, "ptb", **{f"{split}_tokens": number for split, number in tokens.items()}, vocabulary=vocabulary)
    return PennTreebank(root, bptt, tokens, vocabulary, evaluate_on)


def _file(folder: Path, split: str) -> Path:
    return folder / f"ptb.{split}.txt"


def _words(path: Path) -> Iterator[list[str]]:
    """Yield the words of a file, some lines at a time, since it may be large; `<eos>` ends every line."""
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(_BLOCK_LETTERS):
            yield "".join(lines).replace("\n", f" {END} ").split()


def _place(folder: Path, split: str) -> tuple[str, Path]:
    path = _file(folder, split)
    return fingerprint(path), path


@lru_cache(maxsize=4)
def _counts(_: str, path: Path) -> Counter[str]:
    """Return the number of occurrences of each word in a file."""
    counts: Counter[str] = Counter()
    for words in _words(path):
        counts.update(words)
    return counts


@lru_cache(maxsize=2)
def _ids(place: tuple[str, Path], vocabulary: int) -> dict[str, int]:
    return most_frequent(_counts(*place), vocabulary)


@lru_cache(maxsize=4)
def _text(folder: Path, split: str, vocabulary: int) -> torch.Tensor:
    ids = _ids(_place(folder, "train"), vocabulary)
    return torch.cat([encode(words, ids) for words in _words(_file(folder, split))])
