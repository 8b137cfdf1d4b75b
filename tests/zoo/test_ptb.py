"""Penn Treebank's files: layout, vocabulary, sizes, and errors if they are wrong."""

from pathlib import Path

import pytest

from pipebench import zoo
from pipebench.zoo import ptb as module
from pipebench.zoo.ptb import PennTreebank, ptb

TRAIN = " the <unk> sat \n the cat N \n"  # Mikolov's files have a space at both ends of a line
VALID, TEST = " the dog \n", " cat \n cat \n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, text in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        (tmp_path / f"ptb.{split}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def small(folder: Path, **options: object) -> PennTreebank:
    given: dict[str, object] = {"train_tokens": 8, "valid_tokens": 3, "test_tokens": 4, "vocabulary": 6, "bptt": 3}
    return zoo.DATASETS["ptb"].make(root=str(folder) if folder != Path() else "", **given | options)


def test_published_sizes_are_declared_without_the_data() -> None:
    data = ptb(root="nowhere")
    assert data.num_train == -(-929_588 // 70) == 13_280
    assert data.num_eval == -(-73_759 // 70)
    assert ptb(root="nowhere", evaluate_on="test").num_eval == -(-82_429 // 70)
    assert data.example(80)["tokens"].shape == (80, 70)
    assert data.weight("train", range(13_280)) == 929_588


def test_tokens_and_vocabulary(folder: Path) -> None:
    data = small(folder)
    data.check()
    # the 2, <eos> 2, then once each: <unk>, N, cat, sat
    assert data.text("train").tolist() == [1, 2, 5, 0, 1, 4, 3, 0]
    assert data.text("eval").tolist() == [1, 2, 0]  # the dog isn't in the training text
    assert small(folder, evaluate_on="test").text("eval").tolist() == [4, 0, 4, 0]
    assert data.fetch("train", [2], ["next_tokens"])["next_tokens"].tolist() == [[0, -1, -1]]


def test_a_text_is_read_some_lines_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its words are counted once. Lists of all words, made several times, took gigabytes and minutes."""
    monkeypatch.setattr(module, "_BLOCK_LETTERS", 40)
    text = "".join(f"{'a' * (i % 7 + 1)} b{i % 3}\x0c \r\n" for i in range(200)) + "no <unk>"
    (folder / "ptb.train.txt").write_bytes(text.encode())
    opened: list[str] = []
    read = module._words
    monkeypatch.setattr(module, "_words", lambda path: opened.append(path.name) or read(path))  # type: ignore[func-returns-value]
    data = small(folder, train_tokens=602, vocabulary=13)
    data.check()
    expected = text.replace("\r\n", " <eos> ").split()
    ids = {word: i for i, word in enumerate(sorted({*expected}, key=lambda word: (-expected.count(word), word)))}
    assert data.text("train").tolist() == [ids[word] for word in expected]
    assert data.text("eval").shape == (3,)
    assert opened.count("ptb.train.txt") == opened.count("ptb.valid.txt") == 2  # counted, and read
    assert max(map(len, read(folder / "ptb.train.txt"))) < 40


def test_root_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEBENCH_DATA", str(folder.parent))
    moved = folder.rename(folder.parent / "ptb")
    assert moved.is_dir()
    small(Path()).check()
    monkeypatch.delenv("PIPEBENCH_DATA")
    with pytest.raises(FileNotFoundError, match=r"^ptb: no folder is given, .* root, or PIPEBENCH_DATA to the folder"):
        ptb().check()
    monkeypatch.setenv("PIPEBENCH_DATA", "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"no file nowhere/ptb/ptb\.train\.txt; .*root names, .* PIPEBENCH_DATA"
    ):
        ptb().check()


def test_missing_file(folder: Path) -> None:
    (folder / "ptb.valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*ptb\.valid\.txt; expected are ptb\.train\.txt"):
        small(folder).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_tokens": 9}, r"ptb\.train\.txt has 8 tokens .*expected are 9; .*set dataset\.train_tokens"),
        ({"valid_tokens": 2}, r"ptb\.valid\.txt has 3 tokens .*expected are 2; .*set dataset\.valid_tokens"),
        ({"test_tokens": 5}, r"ptb\.test\.txt has 4 tokens .*expected are 5; .*set dataset\.test_tokens"),
        ({"vocabulary": 7}, r"ptb\.train\.txt has 6 different words .*expected are 7; .*set dataset\.vocabulary"),
    ],
)
def test_other_sizes_than_declared(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(folder, **options).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bptt": 0}, "ptb: bptt is 0, allowed is 1 or more"),
        ({"evaluate_on": "train"}, "ptb: evaluate_on is 'train', allowed are valid, test"),
        ({"valid_tokens": 1}, "ptb: valid_tokens is 1, allowed is 2 or more"),
        ({"vocabulary": 1}, "ptb: vocabulary is 1, allowed is 2 or more"),
    ],
)
def test_options_out_of_range(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        small(folder, **options)
