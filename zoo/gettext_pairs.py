"""English-German sentence pairs by human translators, with a small download: the messages of two programs.

They are short, and about few subjects, but real text. The catalogues of Mercurial and pretalx are read from their own
files; nothing of them is in this package.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipebench.zoo import gettext_files
from pipebench.zoo.gettext_files import Pair
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least
from pipebench.zoo.places import DATA_VARIABLE, data_folder
from pipebench.zoo.translation import Selection, SmallTranslation, TranslationOptions, encoding

# The characters of plain text, the last six of which are dashes and quotation marks; placeholders, markup and code have
# others.
_PLAIN = re.compile("[A-Za-zÄÖÜäöüß0-9 .,;:!?'\"()/…\\-\u2013\u2014\u2018\u2019\u201c-\u201e]+")
# Names of options, templates and files: `--all`, `:firstline:`, `.hgtags`, `a::`, `host:port`.
_CODE = re.compile(r"(^|\s)[:\-./]\w|::|--|\w[:.]\w")
_LEAST_VOCABULARY = 128  # two alphabets, digits and punctuation are some 90


class GettextPairs(SmallTranslation):
    """Messages of programs with their German translations; fields as in `Translation`.

    A message is used if both sides are plain text of at most `max_words` words, and differ, and if neither side has
    occurred before, apart from case and punctuation. So no held-out text is trained on. A minibatch is padded to its
    longest sentence.
    """

    def __init__(self, options: TranslationOptions, root: str, max_words: int, split_seed: int) -> None:
        super().__init__(options)
        self.root, self.max_words, self.split_seed = root, max_words, split_seed

    def check(self) -> None:
        """Raise FileNotFoundError, ImportError or ValueError unless the catalogues are there and have enough pairs."""
        super().check()
        found, declared = len(_kept(self._places(), self.max_words)), self.num_train + self.num_eval
        if found < declared:
            raise ValueError(
                f"gettext_pairs: {found} pairs of at most {self.max_words} words are there, set num_train and "
                f"num_eval, now {self.num_train} and {self.num_eval}, to no more together, or raise max_words"
            )
        encoding(self.selection())

    def notes(self) -> dict[str, str]:
        """Return how BLEU is computed and, if there are pairs, their hash, since versions of the programs differ."""
        notes = super().notes()
        with contextlib.suppress(OSError, ValueError):
            content = repr(sorted(self.selection().pairs().items())).encode()
            notes = {name: f"{note}, pairs {hashlib.sha256(content).hexdigest()[:16]}" for name, note in notes.items()}
        return notes

    def _places(self) -> tuple[str, ...]:
        folder = data_folder("gettext_pairs", self.root) if self.root or os.environ.get(DATA_VARIABLE) else None
        return tuple(map(str, gettext_files.find(folder, in_packages=not self.root)))

    def selection(self) -> Selection:
        """Return the pairs of the catalogues that are there now."""
        return _Selection(
            self.num_train, self.num_eval, self.options.vocabulary, self.split_seed, self._places(), self.max_words
        )


def gettext_pairs(
    root: str = "",
    num_train: int = 1880,
    num_eval: int = 200,
    vocabulary: int = 1000,
    max_words: int = 12,
    typical_length: int = 18,
    max_written: int = 60,
    label_smoothing: float = 0.1,
    num_scored: int = 0,
    split_seed: int = 0,
) -> GettextPairs:
    """Build the data set; reads nothing and needs no package yet.

    Args:
        root: folder of catalogues; empty: `gettext_pairs` in the folder that PIPEBENCH_DATA names, or else the
            installed packages.
        num_train: pairs to train on; at the versions that `nox -s data` fetches there are 2,088 to share.
        num_eval: other pairs, held out.
        vocabulary: most tokens of the shared byte-pair encoding, the special ones included.
        max_words: most words of a side of a pair.
        typical_length: width of a minibatch that stands for all in profiles.
        max_written: most tokens of a translation.
        label_smoothing: share of the probability that is spread evenly over the vocabulary, from 0 to below 1.
        num_scored: held-out sentences that BLEU is computed on; 0: all.
        split_seed: which pairs are held out.
    """
    at_least(_LEAST_VOCABULARY, "gettext_pairs", vocabulary=vocabulary)
    at_least(2, "gettext_pairs", max_words=max_words)
    at_least(3, "gettext_pairs", typical_length=typical_length)
    at_least(1, "gettext_pairs", max_written=max_written)
    options = TranslationOptions(
        "gettext_pairs", num_train, num_eval, vocabulary, None, None,
        typical_columns=(typical_length, typical_length), max_written=max_written,
        label_smoothing=label_smoothing, num_scored=num_scored,
    )  # fmt: skip
    return GettextPairs(options, root, max_words, split_seed)


def keep(pairs: Iterable[Pair], max_words: int) -> list[Pair]:
    """Return the pairs (message, translation) to use, as `GettextPairs` says; lines of a text are joined."""
    found: list[Pair] = []
    seen: tuple[set[str], set[str]] = (set(), set())
    for pair in pairs:
        source, target = (" ".join(text.split()) for text in pair)
        plain = all(_PLAIN.fullmatch(text) and not _CODE.search(text) for text in (source, target))
        num_words = len(source.split()), len(target.split())
        if not plain or num_words[0] < 2 or max(num_words) > max_words or source.casefold() == target.casefold():
            continue
        alike = _letters(source), _letters(target)
        if alike[0] in seen[0] or alike[1] in seen[1]:
            continue
        seen[0].add(alike[0])
        seen[1].add(alike[1])
        found.append((source, target))
    return found


@dataclass(frozen=True)
class _Selection(Selection):
    places: tuple[str, ...]
    max_words: int

    def pairs(self) -> dict[str, list[Pair]]:
        return _split(self)


def _letters(text: str) -> str:
    """Return a text without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


@lru_cache(maxsize=4)
def _kept(places: tuple[str, ...], max_words: int) -> list[Pair]:
    return keep((pair for place in places for pair in gettext_files.read(Path(place))), max_words)


@lru_cache(maxsize=4)
def _split(selection: _Selection) -> dict[str, list[Pair]]:
    """Return the pairs of each split; the first ones of the shuffled list are held out."""
    pairs = _kept(selection.places, selection.max_words)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(selection.split_seed)).tolist()
    held_out, train = order[: selection.num_eval], order[selection.num_eval :][: selection.num_train]
    return {"train": [pairs[i] for i in train], "eval": [pairs[i] for i in held_out]}
