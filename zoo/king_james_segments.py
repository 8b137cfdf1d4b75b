"""BERT's pre-training on the King James Bible, without a download; sentences are verses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pipebench.zoo import king_james
from pipebench.zoo.language import END, UNKNOWN, most_frequent
from pipebench.zoo.options import SPLITS
from pipebench.zoo.segments import SegmentOptions, Segments
from pipebench.zoo.text import NUM_SPECIAL, UNK

# Numbers of verses of the package's text, in the splits of `king_james`.
TRAIN_VERSES, EVAL_VERSES = 28_045, 1_484
_MASK = NUM_SPECIAL  # the first id after the special ones of all texts; words follow
_NUM_SPECIAL = _MASK + 1


class KingJamesSegments(Segments):
    """Segments of verses; words have ids in order of their frequency in the training text."""

    def check(self) -> None:
        """Raise ImportError if the package is missing, ValueError if its text isn't the one that is declared."""
        king_james.king_james().check()
        found = {split: len(_verses(split, self.options.vocabulary)) for split in SPLITS}
        if found != dict(self.options.num_sentences):
            raise ValueError(
                f"king_james_segments: the text has {found} verses, expected are {dict(self.options.num_sentences)}"
            )

    def sentences(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the words' ids of some verses."""
        verses = _verses(split, self.options.vocabulary)
        return [verses[index] for index in indices]


def king_james_segments(
    columns: int = 64, sentences: int = 1, vocabulary: int = 4000, num_eval: int = 0
) -> KingJamesSegments:
    """Build the data set; reads nothing.

    Args:
        columns: width of a sample.
        sentences: verses of a segment.
        vocabulary: number of token ids, the special ones and the mask included; rarer words are unknown.
        num_eval: held-out samples, the first ones; 0: all.
    """
    num_sentences = {"train": TRAIN_VERSES, "eval": EVAL_VERSES}
    return KingJamesSegments(
        SegmentOptions("king_james_segments", num_sentences, vocabulary, _MASK, columns, sentences, num_eval)
    )


@lru_cache(maxsize=4)
def _verses(split: str, vocabulary: int) -> list[list[int]]:
    ids = _ids(vocabulary)
    verses: list[list[int]] = [[]]
    for word in king_james.splits()[split]:
        if word == END:
            verses.append([])
        else:
            verses[-1].append(ids.get(word, UNK))
    return verses[:-1]


@lru_cache(maxsize=2)
def _ids(vocabulary: int) -> dict[str, int]:
    special = (UNKNOWN, END)
    words = most_frequent(king_james.splits()["train"], vocabulary - _NUM_SPECIAL + len(special))
    return {word: _NUM_SPECIAL + rank for rank, word in enumerate(word for word in words if word not in special)}
