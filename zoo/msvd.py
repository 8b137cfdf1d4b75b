"""MSVD, the Microsoft Research Video Description corpus (Chen and Dolan 2011): YouTube clips and their captions.

Clips are read as features of their frames, computed beforehand by any network (S2VT: the layer fc7 of VGG-16).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipebench.zoo.captions import Captions, Vocabulary
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least, check_split, more_than, one_of
from pipebench.zoo.places import data_folder
from pipebench.zoo.registry import DataError
from pipebench.zoo.text import NUM_SPECIAL

HELD_OUT = ("valid", "test")
_SPLITS = {"train": "train.txt", "valid": "valid.txt", "test": "test.txt"}
_CAPTIONS = "captions.txt"
_VOCABULARY = "vocabulary.txt"
_FEATURES = "features"
_LAYOUT = f"{_CAPTIONS}, {', '.join(_SPLITS.values())} and {_FEATURES}/<clip>.npy"
_WORD = re.compile(r"\w+(?:'\w+)*")
# Special tokens in files of vocabularies; `zoo.text` has its own.
_NOT_WORDS = {"<pad>", "<unk>", "<en_unk>", "<s>", "</s>", "<eos>"}


class Msvd(Captions):
    """Clips of MSVD; see `Captions` for the fields and `msvd` for the files."""

    def __init__(self, root: str, held_out: str, every: int, num_words: int, sizes: Mapping[str, int]) -> None:
        self.root = root
        self.held_out = held_out
        self.every = every
        self.num_words = num_words
        self.num_ids = dict.fromkeys(("caption_in", "caption_out"), num_words)
        self.num_train, self.num_eval = sizes["num_train"], sizes["num_eval"]
        self.frames, self.num_features, self.words = sizes["frames"], sizes["num_features"], sizes["words"]

    def check(self) -> None:
        """Raise an error, with one readable sentence, if a file is missing or doesn't agree with the options.

        Raises:
            FileNotFoundError: a file or the folder isn't there.
            ValueError: a file has another format, or other numbers of samples than the options say.
            ImportError: a package is missing.
        """
        super().check()
        self._check_number("num_train", len(self._training), f"captions of the clips of {_SPLITS['train']}")
        self._check_number("num_eval", len(self._clips[self.held_out]), f"clips in {_SPLITS[self.held_out]}")
        if len(self.vocabulary()) > self.num_words:
            raise ValueError(
                f"msvd: {self._path(_VOCABULARY)} has {len(self.vocabulary()) - NUM_SPECIAL} words and there are "
                f"{NUM_SPECIAL} special tokens: set vocabulary, of the data set and of the model, to their sum"
            )
        clips = [*self._clips["train"], *self._clips[self.held_out]]
        missing = [clip for clip in clips if not self._features_of(clip).is_file()]
        if missing:
            raise FileNotFoundError(
                f"msvd: {self._features_of(missing[0])} isn't there, nor are the features of {len(missing) - 1} other "
                f"clips of {len(clips)}: expected is one array [frames, {self.num_features}] per clip"
            )
        self._read_features(clips[0])

    def vocabulary(self) -> Vocabulary:
        """Return the words of vocabulary.txt or, without it, the most frequent words of the training captions."""
        return self._words

    def features(self, split: str, indices: Sequence[int]) -> torch.Tensor:
        """Return the clips' first frames, with zeros before those of shorter clips: [samples, frames, num_features]."""
        found = torch.zeros(len(indices), self.frames, self.num_features)
        for row, clip in enumerate(self._clip_of(split, indices)):
            frames = self._read_features(clip)
            found[row, self.frames - len(frames) :] = frames
        return found

    def captions(self, split: str, indices: Sequence[int]) -> list[list[str]]:
        """Return the caption of every training sample, or the first caption of every held-out clip."""
        if split == "train":
            return [list(self._training[index][1]) for index in indices]
        return [list(self._captions[clip][0]) for clip in self._clip_of(split, indices)]

    def references(self, indices: Sequence[int]) -> list[list[list[str]]]:
        """Return all captions of held-out clips, uncut."""
        return [[list(words) for words in self._captions[clip]] for clip in self._clip_of("eval", indices)]

    @cached_property
    def _captions(self) -> dict[str, list[tuple[str, ...]]]:
        """Captions of every clip, in the file's order: lower case, without punctuation, as S2VT's authors have them."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for number, line in self._lines(_CAPTIONS):
            clip, *sentence = line.split(None, 1)
            words = tuple(_WORD.findall(sentence[0].lower())) if sentence else ()
            if not words:
                raise ValueError(
                    f"msvd: {self._path(_CAPTIONS)}, line {number}, is {line[:60]!r}: expected is a clip's id, a tab "
                    f"or a space, and one caption"
                )
            found.setdefault(clip, []).append(words)
        return found

    @cached_property
    def _clips(self) -> dict[str, list[str]]:
        """Clips of the training and the held-out split, in the files' order; each has a caption."""
        found: dict[str, list[str]] = {}
        for split in ("train", self.held_out):
            found[split] = [line.split()[0] for _, line in self._lines(_SPLITS[split])]
            for clip in found[split]:
                if clip not in self._captions:
                    raise ValueError(
                        f"msvd: {self._path(_SPLITS[split])} names {clip!r}, and {_CAPTIONS} has no caption for it"
                    )
        both = set(found["train"]) & set(found[self.held_out])
        if both:
            raise ValueError(
                f"msvd: {min(both)!r} is in {_SPLITS['train']} and in {_SPLITS[self.held_out]} of {self._path('')}: "
                f"a held-out clip can't be trained on"
            )
        return found

    @cached_property
    def _training(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(clip, words) for clip in self._clips["train"] for words in self._captions[clip]]

    @cached_property
    def _words(self) -> Vocabulary:
        if self._path(_VOCABULARY).is_file():
            listed = [line.split()[0] for _, line in self._lines(_VOCABULARY)]
            return Vocabulary(list(dict.fromkeys(word for word in listed if word.lower() not in _NOT_WORDS)))
        counts = Counter(word for _, words in self._training for word in words)
        commonest = sorted(counts, key=lambda word: (-counts[word], word))
        return Vocabulary(commonest[: self.num_words - NUM_SPECIAL])

    def _clip_of(self, split: str, indices: Sequence[int]) -> list[str]:
        check_split("msvd", split)
        if split == "train":
            return [self._training[index][0] for index in indices]
        return [self._clips[self.held_out][index] for index in indices]

    def _read_features(self, clip: str) -> torch.Tensor:
        """Return the frames of a clip that are used: [at most `frames`, num_features] float32."""
        import numpy

        path = self._features_of(clip)
        try:
            frames: Any = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"msvd: {path} can't be read: expected is an array that numpy.save wrote") from error
        if frames.ndim != 2 or frames.shape[1] != self.num_features or not len(frames):
            raise DataError(
                f"msvd: {path} has the shape {list(frames.shape)}: expected is [frames, {self.num_features}]; the "
                f"option num_features says how many numbers there are per frame"
            )
        used = numpy.array(frames[:: self.every][: self.frames], dtype=numpy.float32)
        return torch.from_numpy(used)

    def _check_number(self, option: str, found: int, what: str) -> None:
        expected = getattr(self, option)
        if found != expected:
            raise ValueError(f"msvd: {self._path('')} has {found} {what}, not {expected}: set {option} to {found}")

    def _features_of(self, clip: str) -> Path:
        return self._path(_FEATURES, f"{clip}.npy")

    def _path(self, *parts: str) -> Path:
        return data_folder("msvd", self.root, _LAYOUT).joinpath(*parts)

    def _lines(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield number and text of a file's lines, without empty ones and comments."""
        path = self._path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"msvd: {path} isn't there: expected in the folder are {_LAYOUT}; another folder is given by the "
                "option root, or by PIPEBENCH_DATA"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"msvd: {path} isn't text in UTF-8: {error.reason} at byte {error.start}") from error
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and not line.startswith("#"):
                yield number, line.strip()


def msvd(
    root: str = "",
    held_out: str = "valid",
    num_train: int = 48_774,
    num_eval: int = 100,
    vocabulary: int = 46_168,
    frames: int = 60,
    words: int = 20,
    num_features: int = 4096,
    every: int = 1,
) -> Msvd:
    """Build the data set; reads nothing.

    The folder holds:
        captions.txt: lines `<clip> <caption>`, separated by a tab or a space; # begins a comment. This is the format
            of the AllVideoDescriptions.txt that MSVD is handed out with.
        train.txt, valid.txt, test.txt: lines with a clip each (the usual split is 1,200, 100 and 670 clips of 1,970).
        features/<clip>.npy: [frames, num_features], any float type.
        vocabulary.txt, optional: a word per line, such as the file that S2VT's authors released. Without it, words are
            those of the training captions, the most frequent first.

    Args:
        root: the folder; empty: `msvd` in the folder that PIPEBENCH_DATA names.
        held_out: `valid` or `test`: the clips that METEOR is measured on.
        num_train: captions of the training clips; a clip with forty captions gives forty samples. Published: 80,827
            captions of all 1,970 clips (S2VT, table 1). Assumed: the number of training clips' captions; check() says
            what to set.
        num_eval: held-out clips: 100 of valid.txt, 670 of test.txt.
        vocabulary: most words, the special tokens included; the model's option of that name must be the same.
        frames: frames of a clip that are read; shorter clips have zeros before.
        words: most words of a caption, its end included; longer ones are cut, but not as references.
        num_features: numbers per frame.
        every: interval between the frames read from the files; S2VT samples every tenth frame of a video.
    """
    one_of(HELD_OUT, "msvd", held_out=held_out)
    sizes = {
        "num_train": num_train, "num_eval": num_eval, "frames": frames, "words": words, "num_features": num_features,
    }  # fmt: skip
    at_least(1, "msvd", **sizes, every=every)
    more_than(NUM_SPECIAL, "msvd", "the special tokens", vocabulary=vocabulary)
    return Msvd(root, held_out, every, vocabulary, sizes)
