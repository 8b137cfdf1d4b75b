"""Captioned videos without a download: handwritten digits that move, and sentences about them.

The task is MSVD's on a small scale: to recognise what is in the frames and what happens across them, and to say it in a
language that has several ways to say one thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from pipebench.zoo.captions import Captions, Vocabulary
from pipebench.zoo.late import torch
from pipebench.zoo.mnist5k import PIXEL_MEAN, PIXEL_STD, mnist5k
from pipebench.zoo.options import at_least, check_split

SIDE = 16  # height and width of a frame, in pixels
_DIGIT_SIDE = 10  # MNIST's digits fill 20 x 20 pixels: halved
_ROOM = SIDE - _DIGIT_SIDE  # pixels that a digit can move
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Motion:
    """A direction and a speed, with the words for them."""

    right: int  # +1, 0 or -1
    down: int  # +1, 0 or -1
    pixels: int  # distance from the first frame to the last
    words: Mapping[str, str]  # by name in the templates


_DIRECTIONS = (
    (-1, 0, {"direction": "left", "towards": "leftwards"}),
    (1, 0, {"direction": "right", "towards": "rightwards"}),
    (0, -1, {"direction": "up", "towards": "upwards"}),
    (0, 1, {"direction": "down", "towards": "downwards"}),
)
_SPEEDS = (
    (_ROOM // 2, {"moves": "creeps", "moving": "creeping", "how": "slowly"}),
    (_ROOM, {"moves": "rushes", "moving": "rushing", "how": "quickly"}),
)
MOTIONS = tuple(Motion(x, y, pixels, {**a, **b}) for x, y, a in _DIRECTIONS for pixels, b in _SPEEDS)

# Captions have few words besides what is seen: with phrases that fit every clip, one caption for all would score well.
TEMPLATES = (
    "a {digit} {moves} {direction}",
    "{digit} {moving} {towards}",
    "the {digit} is {moving} {direction}",
    "{direction} {moves} the {digit}",
    "{how} a {digit} goes {direction}",
)


@dataclass(frozen=True)
class Clips:
    """The content of a split's samples: tensors [samples] int64."""

    digit: torch.Tensor  # index in the split of `mnist5k`
    motion: torch.Tensor  # index in `MOTIONS`
    place: torch.Tensor  # position across the motion: pixels from the left or upper edge
    start: torch.Tensor  # position along the motion in the first frame: pixels from the edge that the digit leaves
    template: torch.Tensor  # index in `TEMPLATES`, of the caption to train on


class MovingDigits(Captions):
    """Clips of one moving digit; held-out clips show held-out digits. See `Captions` for the fields."""

    num_features = SIDE * SIDE

    def __init__(self, num_train: int, num_eval: int, frames: int, words: int, seed: int) -> None:
        self.num_train, self.num_eval = num_train, num_eval
        self.frames, self.words = frames, words
        self.seed = seed
        self.num_ids = dict.fromkeys(("caption_in", "caption_out"), len(_vocabulary()))
        self._digits = mnist5k(image_size=28)

    def check(self) -> None:
        """Raise ImportError, with one readable sentence, if a package is missing."""
        super().check()
        self._digits.check()

    def vocabulary(self) -> Vocabulary:
        """Return every word of the templates, in alphabetical order."""
        return _vocabulary()

    def features(self, split: str, indices: Sequence[int]) -> torch.Tensor:
        """Return the frames' pixels from 0 (black) to 1, row by row: [samples, frames, 256] float32."""
        clips, rows = self._clips(split), torch.as_tensor(indices, dtype=torch.int64)
        digits = _small_digits(split)[0][clips.digit[rows]]
        left, top = self._path(clips, rows)
        clip, frame = torch.meshgrid(torch.arange(len(rows)), torch.arange(self.frames), indexing="ij")
        pixels = torch.zeros(len(rows), self.frames, SIDE, SIDE)
        span = torch.arange(_DIGIT_SIDE)
        y = top[:, :, None, None] + span[:, None]
        x = left[:, :, None, None] + span
        pixels[clip[:, :, None, None], frame[:, :, None, None], y, x] = digits[:, None]
        return pixels.flatten(2)

    def captions(self, split: str, indices: Sequence[int]) -> list[list[str]]:
        """Return a caption of every sample, by its template."""
        clips, labels = self._clips(split), self._labels(split)
        return [_say(int(clips.template[i]), int(labels[i]), int(clips.motion[i])) for i in indices]

    def references(self, indices: Sequence[int]) -> list[list[list[str]]]:
        """Return the held-out clips' captions by all templates."""
        clips, labels = self._clips("eval"), self._labels("eval")
        ways = range(len(TEMPLATES))
        return [[_say(way, int(labels[i]), int(clips.motion[i])) for way in ways] for i in indices]

    def _clips(self, split: str) -> Clips:
        check_split("moving_digits", split)
        if split == "train":
            return _drawn(self.num_train, self._digits.num_train, 2 * self.seed)
        return _drawn(self.num_eval, self._digits.num_eval, 2 * self.seed + 1)

    def _labels(self, split: str) -> torch.Tensor:
        return _small_digits(split)[1][self._clips(split).digit]

    def _path(self, clips: Clips, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the digit's distances from the left and the upper edge in pixels: two [samples, frames] int64."""
        motion = clips.motion[rows]
        right, down, pixels = torch.tensor([(m.right, m.down, m.pixels) for m in MOTIONS])[motion].unbind(1)
        moved = torch.arange(self.frames) * pixels[:, None] // (self.frames - 1)
        along = clips.start[rows, None] + moved
        across = clips.place[rows, None].expand_as(along)
        forward = torch.where((right + down)[:, None] > 0, along, _ROOM - along)
        level = (right != 0)[:, None]
        return torch.where(level, forward, across), torch.where(level, across, forward)


def moving_digits(
    num_train: int = 6000, num_eval: int = 400, frames: int = 7, words: int = 6, seed: int = 0
) -> MovingDigits:
    """Build the data set; reads nothing. Its digits are those of `mnist5k`, held-out ones in held-out clips.

    Args:
        num_train: training clips, each with one caption.
        num_eval: held-out clips, each with one caption per template.
        frames: frames of a clip, at least 2.
        words: most words of a caption, its end included; longer ones are cut. The longest has 5 and its end.
        seed: of the digits, motions and templates; clips are the same on every machine.
    """
    at_least(1, "moving_digits", num_train=num_train, num_eval=num_eval, words=words)
    at_least(2, "moving_digits", frames=frames)
    at_least(0, "moving_digits", seed=seed)
    return MovingDigits(num_train, num_eval, frames, words, seed)


def _say(template: int, digit: int, motion: int) -> list[str]:
    return TEMPLATES[template].format(digit=_DIGITS[digit], **MOTIONS[motion].words).split()


@cache
def _vocabulary() -> Vocabulary:
    numbers = [range(len(TEMPLATES)), range(len(_DIGITS)), range(len(MOTIONS))]
    said = (_say(way, digit, motion) for way in numbers[0] for digit in numbers[1] for motion in numbers[2])
    return Vocabulary(sorted({word for words in said for word in words}))


@lru_cache(maxsize=8)
def _drawn(num_clips: int, num_digits: int, seed: int) -> Clips:
    """Draw a split's clips, five numbers each, row by row: the first clips don't depend on the number of clips."""
    drawn = torch.rand(num_clips, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    motion = (drawn[:, 1] * len(MOTIONS)).long()
    spare = _ROOM - torch.tensor([each.pixels for each in MOTIONS])[motion]
    return Clips(
        digit=(drawn[:, 0] * num_digits).long(),
        motion=motion,
        place=(drawn[:, 2] * (_ROOM + 1)).long(),
        start=(drawn[:, 3] * (spare + 1)).long(),
        template=(drawn[:, 4] * len(TEMPLATES)).long(),
    )


@cache
def _small_digits(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a split's digits at half their size, [digits, 10, 10] float32 from 0 to 1, and their labels."""
    digits = mnist5k(image_size=28)
    number = digits.num_train if split == "train" else digits.num_eval
    found = digits.fetch(split, range(number), ["image", "label"])
    images = found["image"] * PIXEL_STD + PIXEL_MEAN
    margin = (images.shape[-1] - 2 * _DIGIT_SIDE) // 2
    inner = images[:, 0, margin:-margin, margin:-margin].clamp(0, 1)
    return torch.nn.functional.avg_pool2d(inner, 2), found["label"]
