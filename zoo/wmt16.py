"""WMT16 English-German as MLPerf's GNMT prepares it: tokenised text in byte pairs, and its vocabulary.

PipeDream (SOSP'19), Table 1, trains GNMT on it to BLEU 21.8, MLPerf v0.5's target. MLPerf's preparation tokenises
Europarl, Common Crawl and News Commentary by Moses' rules, leaves out pairs with more than 80 tokens on a side or with
characters that aren't in Latin-1, learns 32,000 merges on both languages, and writes the files named below.
"""

import contextlib
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy

from pipebench.zoo import line_index
from pipebench.zoo.bpe import undo_marks
from pipebench.zoo.late import optional
from pipebench.zoo.line_index import Integers, LineIndex
from pipebench.zoo.options import at_least, check_split, one_of
from pipebench.zoo.places import cache_folder, data_folder, write_whole
from pipebench.zoo.registry import LengthClass
from pipebench.zoo.text import NUM_SPECIAL, SPECIAL_TOKENS, UNK, round_up
from pipebench.zoo.translation import SIDES, Translation, TranslationOptions

# Pairs and ids in the logs of MLPerf Training v0.5's closed GNMT submissions: 4,068,191 pairs, 3,498,161 of them within
# 50 tokens, and a vocabulary padded to 32,320 ids. newstest2014 has 3,003 sentences.
NUM_TRAIN, NUM_EVAL = 3_498_161, 3003
VOCABULARY = 32_320
MAX_LENGTH, NUM_BUCKETS = 50, 5
# From the same logs: 61,500 tokens/s in minibatches of 128 pairs that take 0.101 s are 24 tokens a side. Padding to the
# longest of a bucket that is 10 wide adds about half a bucket.
TYPICAL_LENGTH = 30
FIXED, DECLARED = "fixed", "declared"
# The length of the longer side of a pair, in tokens, is assumed to be log-normal, as is usual for sentences. Two
# conditions give its parameters: of the pairs within 80 tokens, 3,498,161 / 4,068,191 are within 50 (the same logs),
# and minibatches are as wide on average as `TYPICAL_LENGTH`. The mean is then 25.5 tokens.
_LOG_MEAN, _LOG_DEVIATION = 3.341, 0.654
_VOCABULARY_MULTIPLE = 8  # as MLPerf pads it
_FRAME = 2  # begin and end, which MLPerf counts in lengths
_LANGUAGES = {"source": "en", "target": "de"}
_VOCABULARY_FILE = "vocab.bpe.32000"
_REFERENCE_FILE = "newstest2014.de"
TOKENS = (
    *(f"{text}.bpe.32000.{lang}" for text in ("train.tok.clean", "newstest2014.tok") for lang in ("en", "de")),
    _VOCABULARY_FILE,
)
_LAYOUT = (*TOKENS, _REFERENCE_FILE)


class Wmt16(Translation):
    """WMT16 English-German; fields as in `Translation`, a minibatch padded to its longest sentence.

    Training pairs with a side of more than `max_length` tokens, begin and end included, are left out, as in MLPerf.
    Held out is newstest2014. Tokens of the vocabulary file have ids from 4 on, in the file's order. Differs: the loss
    is the mean over tokens; MLPerf sums over a sentence's tokens, so its gradients' norms, which it clips, are some 24
    times those here.
    """

    def __init__(
        self, options: TranslationOptions, root: str, max_length: int, loader_processes: int, lengths: str = FIXED
    ) -> None:
        super().__init__(options)
        self.root, self.max_length, self.loader_processes = root, max_length, loader_processes
        self.lengths = length_classes(max_length) if lengths == DECLARED else ()

    def check(self) -> None:
        """Raise OSError, ImportError or ValueError unless the files are there and of the declared sizes."""
        super().check()
        self.check_tokens(_LAYOUT, {"train": "num_train", "eval": "num_eval"})
        reference = data_folder("wmt16", self.root) / _REFERENCE_FILE
        lines = len(_index(line_index.fingerprint(reference), reference).starts)
        if lines != self.num_eval:
            raise ValueError(f"wmt16: {reference} has {lines} lines, expected is one for each of {self.num_eval} pairs")
        _detokenizer("target")

    def check_tokens(self, layout: Sequence[str], options: Mapping[str, str], spare: int = 0) -> None:
        """Check the files that training needs if nothing is translated; raises as `check` does.

        Args:
            layout: names of the files.
            options: by split, the name of the option that declares its number of pairs.
            spare: ids that the vocabulary's tokens must leave free.
        """
        folder = data_folder("wmt16", self.root, ", ".join(layout))
        if not folder.is_dir():
            raise FileNotFoundError(f"wmt16: {folder} is no folder; expected is one with {', '.join(layout)}")
        missing = [name for name in layout if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"wmt16: {folder} has no {', '.join(missing)}; expected is what MLPerf's GNMT preparation leaves: "
                f"{', '.join(layout)}"
            )
        for (split, option), declared in zip(options.items(), (self.num_train, self.num_eval), strict=True):
            pairs = len(self._side("source", split)[1].starts)
            if pairs != declared:
                raise ValueError(f"wmt16: {pairs} {split} pairs are there, set {option}, now {declared}, to that")
        tokens = round_up(len(_words(self._place(_VOCABULARY_FILE))) + spare, _VOCABULARY_MULTIPLE)
        if tokens != self.options.vocabulary:
            raise ValueError(
                f"wmt16: {_VOCABULARY_FILE} makes {tokens} token ids, set vocabulary, now {self.options.vocabulary}, "
                "to that"
            )

    def tokens(self, side: str, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the token ids of sentences, without begin and end."""
        ids = _ids(self._place(_VOCABULARY_FILE))
        return [[ids.get(token, UNK) for token in line.split()] for line in self._lines(side, split, indices)]

    def held_out(self, side: str, indices: Sequence[int]) -> list[str]:
        """Return sentences of newstest2014: German as published, English detokenised."""
        if side == "target":
            path = data_folder("wmt16", self.root) / _REFERENCE_FILE
            starts = _index(line_index.fingerprint(path), path).starts
            return [line.decode().strip() for line in line_index.read_lines(path, starts[_rows(indices)])]
        return [_detokenised(side, line.decode()) for line in self._lines(side, "eval", indices)]

    def text(self, ids: Sequence[int]) -> str:
        """Return the German sentence of some tokens: byte pairs joined, then detokenised by Moses' rules."""
        words = _words(self._place(_VOCABULARY_FILE))
        return _detokenised("target", " ".join(words[i] for i in ids if i == UNK or NUM_SPECIAL <= i < len(words)))

    def target_lengths(self, split: str, indices: Sequence[int]) -> list[int]:
        """Return the number of tokens of target sentences, without begin and end, from the index of the file."""
        lengths: list[int] = self._side("target", split)[1].counts[_rows(indices)].tolist()
        return lengths

    def buckets(self) -> Sequence[int]:
        """Return each training pair's bucket, one of MLPerf's five: by its longer side's length."""
        width = _bucket_width(self.max_length)
        longer = numpy.maximum(*(self._side(side, "train")[1].counts for side in SIDES)) + _FRAME
        found: list[int] = numpy.minimum(longer // width, NUM_BUCKETS - 1).tolist()
        return found

    def _place(self, name: str) -> tuple[Path, str]:
        path = data_folder("wmt16", self.root) / name
        return path, line_index.fingerprint(path)

    def _lines(self, side: str, split: str, indices: Sequence[int]) -> list[bytes]:
        path, index = self._side(side, split)
        return line_index.read_lines(path, index.starts[_rows(indices)])

    def _side(self, side: str, split: str) -> tuple[Path, LineIndex]:
        """Return the file of one side of a split, and the index of its sentences."""
        check_split("wmt16", split)
        text = "train.tok.clean" if split == "train" else "newstest2014.tok"
        paths = [data_folder("wmt16", self.root) / f"{text}.bpe.32000.{_LANGUAGES[each]}" for each in SIDES]
        most = self.max_length - _FRAME if split == "train" else None
        both = _pairs(tuple(map(line_index.fingerprint, paths)), (paths[0], paths[1]), most)
        return paths[SIDES.index(side)], both[SIDES.index(side)]


def wmt16(
    root: str = "",
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    vocabulary: int = VOCABULARY,
    max_length: int = MAX_LENGTH,
    typical_length: int = TYPICAL_LENGTH,
    max_written: int = 149,
    label_smoothing: float = 0.1,
    num_scored: int = 0,
    loader_processes: int = 1,
    lengths: str = FIXED,
) -> Wmt16:
    """Build the data set; reads nothing.

    Args:
        root: folder of the files; empty: `wmt16` in the folder that PIPEBENCH_DATA names.
        num_train: training pairs within `max_length`.
        num_eval: sentences of newstest2014.
        vocabulary: number of token ids, special ones included, rounded up to a multiple of 8.
        max_length: most tokens of a side of a training pair, begin and end included, as MLPerf counts.
        typical_length: width of minibatches in profiles.
        max_written: most tokens of a translation, its end included; MLPerf has 150 with begin.
        label_smoothing: share of the probability that is spread evenly over the vocabulary, from 0 to below 1.
        num_scored: sentences of newstest2014 that BLEU is computed on; 0: all, as published scores are.
        loader_processes: processes in which an engine reads sentences ahead; 0: in its own.
        lengths: widths of minibatches in simulations: `fixed`: `typical_length`; `declared`: those of their buckets, by
            published counts of sentences; see `length_classes`.
    """
    at_least(5, "wmt16", max_length=max_length)
    at_least(1, "wmt16", max_written=max_written)
    at_least(0, "wmt16", loader_processes=loader_processes)
    if not 3 <= typical_length <= max_length:
        raise ValueError(f"wmt16: typical_length is {typical_length}, allowed is 3 to max_length, {max_length}")
    one_of((FIXED, DECLARED), "wmt16", lengths=lengths)
    if lengths == DECLARED and typical_length != TYPICAL_LENGTH:
        raise ValueError(
            f"wmt16: typical_length is {typical_length}, which lengths: {DECLARED} doesn't use: leave one of them out"
        )
    if vocabulary % _VOCABULARY_MULTIPLE:
        raise ValueError(f"wmt16: vocabulary is {vocabulary}, allowed is a multiple of {_VOCABULARY_MULTIPLE}")
    # As MLPerf's command: case is ignored, with mteval's international tokenisation.
    options = TranslationOptions(
        "wmt16", num_train, num_eval, vocabulary, None, None,
        typical_columns=(typical_length, typical_length), max_written=max_written,
        label_smoothing=label_smoothing, num_scored=num_scored, tokenize="intl", lowercase=True,
    )  # fmt: skip
    return Wmt16(options, root, max_length, loader_processes, lengths)


def length_classes(max_length: int) -> tuple[LengthClass, ...]:
    """Return the widths of minibatches, each of which has sentences of one of MLPerf's five buckets.

    A minibatch is as wide as its longest sentence: of 64 sentences, one is about as long as its bucket allows. A bucket
    has the same share of the minibatches as of the sentences, since minibatches have equally many.
    """
    width = _bucket_width(max_length)
    longest = [*(width * (bucket + 1) - 1 for bucket in range(NUM_BUCKETS - 1)), max_length]
    below = [0.0, *(_share_within(most) for most in longest)]
    return tuple(
        LengthClass(most, (b - a) / below[-1]) for most, (a, b) in zip(longest, itertools.pairwise(below), strict=True)
    )


def _bucket_width(max_length: int) -> int:
    return -(-max_length // NUM_BUCKETS)


def _share_within(most: int) -> float:
    """Return the share of pairs whose longer side has at most `most` tokens."""
    deviations = (math.log(most + 0.5) - _LOG_MEAN) / _LOG_DEVIATION
    return (1 + math.erf(deviations / math.sqrt(2))) / 2


def _rows(indices: Sequence[int]) -> Integers:
    return numpy.asarray(indices, dtype=numpy.int64)


@lru_cache(maxsize=4)
def _pairs(fingerprints: tuple[str, ...], paths: tuple[Path, Path], most: int | None) -> tuple[LineIndex, LineIndex]:
    """Return the indices of both files, of pairs whose sides have at most `most` tokens; stored in the user's cache.

    `fingerprints` are of the files, for the cache.

    Raises:
        ValueError: the files don't have equally many lines.
    """
    key = hashlib.sha256("\n".join([*fingerprints, str(most)]).encode()).hexdigest()[:32]
    path = cache_folder("wmt16") / f"{key}.npz"
    found = line_index.from_file(path, 2)
    if found is None:
        found = _scanned_pairs(paths, most)
        with contextlib.suppress(OSError):
            write_whole(path, line_index.to_bytes(*found))
    return found[0], found[1]


def _scanned_pairs(paths: tuple[Path, Path], most: int | None) -> tuple[LineIndex, ...]:
    both = [line_index.scan(path) for path in paths]
    lines = [len(index.starts) for index in both]
    if lines[0] != lines[1]:
        raise ValueError(
            f"wmt16: {paths[0]} has {lines[0]} lines and {paths[1].name} {lines[1]}, expected is one per pair in both"
        )
    if most is not None:
        rows = numpy.flatnonzero((both[0].counts <= most) & (both[1].counts <= most)).astype(numpy.int64)
        both = [index.take(rows) for index in both]
    return tuple(both)


@lru_cache(maxsize=2)
def _index(fingerprint: str, path: Path) -> LineIndex:
    return line_index.scan(path)


@lru_cache(maxsize=2)
def _words(place: tuple[Path, str]) -> list[str]:
    """Return the tokens in order of their ids, the special ones first."""
    return [*SPECIAL_TOKENS, *(line.strip().decode() for line in place[0].read_bytes().splitlines())]


@lru_cache(maxsize=2)
def _ids(place: tuple[Path, str]) -> dict[bytes, int]:
    return {word.encode(): i for i, word in enumerate(_words(place)) if i >= NUM_SPECIAL}


@lru_cache(maxsize=2)
def _detokenizer(side: str) -> Any:
    with optional("wmt16", "sacremoses"):
        from sacremoses import MosesDetokenizer
    return MosesDetokenizer(lang=_LANGUAGES[side])


def _detokenised(side: str, line: str) -> str:
    return str(_detokenizer(side).detokenize(undo_marks(line).split()))
