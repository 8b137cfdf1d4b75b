"""MSVD from files: a small corpus, and one sentence for every fault that it can have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pipebench import zoo
from pipebench.zoo.msvd import Msvd, msvd
from pipebench.zoo.registry import DataError
from pipebench.zoo.text import BOS, EOS, NUM_SPECIAL, PAD, UNK

CAPTIONS = """# id, then a caption
clip-1\tA man is riding a horse.
clip_2 A cat -- it's small -- runs!

clip-1 A man rides
3clip\tThe cat is asleep
clip_4\tA dog
3clip   the cat   sleeps on the very long and very soft red sofa
"""
NUM_FEATURES = 5


def frames_of(number: int, num_frames: int) -> Any:
    return numpy.arange(num_frames * NUM_FEATURES, dtype=numpy.float64).reshape(num_frames, NUM_FEATURES) + 100 * number


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "captions.txt").write_text(CAPTIONS)
    (tmp_path / "train.txt").write_text("clip_2\nclip-1\n")
    (tmp_path / "valid.txt").write_text("3clip\n")
    (tmp_path / "test.txt").write_text("clip_4\n3clip\n")
    (tmp_path / "features").mkdir()
    for number, (clip, num_frames) in enumerate({"clip-1": 2, "clip_2": 9, "3clip": 4, "clip_4": 3}.items(), 1):
        numpy.save(tmp_path / "features" / f"{clip}.npy", frames_of(number, num_frames))
    return tmp_path


def make(root: Path | str, **options: Any) -> Msvd:
    sizes = {"num_train": 3, "num_eval": 1, "frames": 4, "words": 8, "num_features": NUM_FEATURES}
    return msvd(str(root), **sizes | options)


def test_training_samples_are_captions(root: Path) -> None:
    dataset = make(root)
    dataset.check()
    assert dataset.captions("train", [0, 1, 2]) == [
        ["a", "cat", "it's", "small", "runs"],
        ["a", "man", "is", "riding", "a", "horse"],
        ["a", "man", "rides"],
    ]


def test_held_out_samples_are_clips_with_all_their_captions(root: Path) -> None:
    dataset = make(root)
    assert dataset.captions("eval", [0]) == [["the", "cat", "is", "asleep"]]
    long = ["the", "cat", "sleeps", "on", "the", "very", "long", "and", "very", "soft", "red", "sofa"]
    assert dataset.references([0]) == [[["the", "cat", "is", "asleep"], long]]
    test = make(root, held_out="test", num_eval=2)
    test.check()
    assert test.captions("eval", [0, 1]) == [["a", "dog"], ["the", "cat", "is", "asleep"]]


def test_vocabulary_is_the_commonest_training_words(root: Path) -> None:
    """`a` four times, `man` twice, the others once, in alphabetical order; held-out words are unknown."""
    dataset = make(root, vocabulary=NUM_SPECIAL + 4)
    assert dataset.vocabulary().words[NUM_SPECIAL:] == ("a", "man", "cat", "horse")
    assert dataset.fetch("train", [2], ["caption_out"])["caption_out"].tolist() == [[4, 5, UNK, EOS, *[PAD] * 4]]
    assert dataset.fetch("eval", [0], ["caption_in"])["caption_in"].tolist() == [[BOS, UNK, 6, UNK, UNK, *[PAD] * 3]]
    assert dataset.weight("train", [0, 1, 2]) == 6 + 7 + 4


def test_vocabulary_file(root: Path) -> None:
    (root / "vocabulary.txt").write_text("<en_unk>\nman\nhorse 12\nman\n")
    dataset = make(root)
    assert dataset.vocabulary().words[NUM_SPECIAL:] == ("man", "horse")
    dataset.check()
    with pytest.raises(ValueError, match=r"vocabulary.txt has 2 words and there are 4 special tokens: set vocabulary"):
        make(root, vocabulary=5).check()


def test_frames_are_cut_and_padded_before(root: Path) -> None:
    features = make(root).fetch("train", [1, 0], ["features"])["features"]
    assert (features.shape, features.dtype) == ((2, 4, NUM_FEATURES), torch.float32)
    assert not features[0, :2].any()
    assert torch.equal(features[0, 2:], torch.from_numpy(frames_of(1, 2)).float())
    assert torch.equal(features[1], torch.from_numpy(frames_of(2, 9)[:4]).float())
    every = make(root, every=3).features("train", [0])
    assert torch.equal(every[0, 1:], torch.from_numpy(frames_of(2, 9)[::3]).float())
    assert not every[0, 0].any()
    assert torch.equal(make(root).features("eval", [0])[0], torch.from_numpy(frames_of(3, 4)).float())


def test_captions_are_read_without_features(root: Path) -> None:
    for path in (root / "features").iterdir():
        path.unlink()
    dataset = make(root)
    assert dataset.fetch("train", [0], ["caption_out"])["caption_out"].shape == (1, 8)
    with pytest.raises(DataError):
        dataset.fetch("train", [0], ["features"])


def test_constructing_and_planning_read_nothing() -> None:
    dataset = msvd(root="/nowhere")
    shapes = {field: tuple(value.shape) for field, value in dataset.example(2).items()}
    assert shapes == {"features": (2, 60, 4096), "caption_in": (2, 20), "caption_out": (2, 20)}
    assert (dataset.num_train, dataset.num_eval) == (48_774, 100)
    assert zoo.DATASETS["msvd"].make is msvd


def test_the_folder_comes_from_the_option_or_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set its option root, or PIPEBENCH_DATA"):
        make("").check()
    (tmp_path / "msvd").symlink_to(root)
    monkeypatch.setenv("PIPEBENCH_DATA", str(tmp_path))
    make("").check()


def unlink(name: str) -> Callable[[Path], Any]:
    return lambda root: (root / name).unlink()


def write(name: str, text: str | bytes) -> Callable[[Path], Any]:
    content = text.encode() if isinstance(text, str) else text
    return lambda root: (root / name).write_bytes(content)


def save(name: str, array: Any) -> Callable[[Path], Any]:
    return lambda root: numpy.save(root / "features" / name, array)


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (unlink("captions.txt"), FileNotFoundError, "captions.txt isn't there: expected in the folder are"),
        (unlink("train.txt"), FileNotFoundError, "train.txt isn't there"),
        (unlink("features/3clip.npy"), FileNotFoundError, "3clip.npy isn't there, nor are .* 0 other clips of 3"),
        (write("captions.txt", CAPTIONS + "clip_9\n"), ValueError, "captions.txt, line 9, is 'clip_9': expected is a"),
        (write("captions.txt", CAPTIONS + "clip-1 more\n"), ValueError, "4 captions .*, not 3: set num_train to 4"),
        (write("captions.txt", b"clip-1 \xff\n"), ValueError, "captions.txt isn't text in UTF-8"),
        (write("valid.txt", "3clip\nclip_4\n"), ValueError, "has 2 clips in valid.txt, not 1: set num_eval to 2"),
        (write("valid.txt", "clip-1\n"), ValueError, "'clip-1' is in train.txt and in valid.txt .* be trained on"),
        (write("valid.txt", "5clip\n"), ValueError, "valid.txt names '5clip', and captions.txt has no caption for it"),
        (save("clip_2.npy", numpy.zeros((3, 7))), ValueError, r"clip_2.npy has the shape \[3, 7\]: .* \[frames, 5\]"),
        (save("clip_2.npy", numpy.zeros(5)), ValueError, r"clip_2.npy has the shape \[5\]"),
        (save("clip_2.npy", numpy.zeros((0, 5))), ValueError, r"clip_2.npy has the shape \[0, 5\]"),
        (write("features/clip_2.npy", "text"), DataError, "clip_2.npy can't be read: expected is an array"),
        (write("features/clip_2.npy", ""), DataError, "clip_2.npy can't be read: expected is an array"),
    ],
)  # fmt: skip
def test_faults_of_files_are_one_sentence(root: Path, damage: Any, kind: type[Exception], message: str) -> None:
    damage(root)
    with pytest.raises(kind, match=f"^msvd: .*{message}") as caught:
        make(root).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, 0) for option in ("num_train", "num_eval", "frames", "words", "num_features", "every")),
        *(("vocabulary", 4), ("held_out", "train")),
    ],
)
def test_options_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^msvd: {option} is '?{value}'?, allowed "):
        zoo.DATASETS["msvd"].make(**{option: value})


def test_unknown_split(root: Path) -> None:
    with pytest.raises(ValueError, match="split is 'valid', allowed are train, eval"):
        make(root).captions("valid", [0])
