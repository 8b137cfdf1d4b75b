"""Byte-pair encodings: learnt the same way every time, cached, restored exactly."""

import os
import sys
from pathlib import Path

import pytest

from pipebench.zoo import bpe
from pipebench.zoo.text import NUM_SPECIAL, SPECIAL_TOKENS, UNK

TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "süß und süßer, am süßesten"] * 5


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pipebench" / "bpe"


def test_text_survives_the_round_trip() -> None:
    encoding = bpe.learn(TEXTS, 60)
    for text in [*TEXTS, "lowest süß newer", "w", ""]:
        assert encoding.decode(encoding.encode(text)) == text


def test_the_most_frequent_pair_is_merged_first() -> None:
    """With one token besides characters, special tokens and the mark of a word's start, `a` and `b` are merged."""
    encoding = bpe.learn(["xab yab", "zab ab"], NUM_SPECIAL + 1 + 5 + 1)
    pieces = [encoding.decode([token]) for token in range(encoding.num_tokens)]
    assert [piece for piece in pieces if len(piece) > 1] == ["ab"]


def test_special_tokens_come_first_and_are_never_written() -> None:
    encoding = bpe.learn([*TEXTS, *SPECIAL_TOKENS], 60)
    assert encoding.num_tokens <= 60
    assert min(min(encoding.encode(text)) for text in TEXTS) >= NUM_SPECIAL
    low = encoding.encode("low")
    assert encoding.decode([2, *low, 3, 0, 0, 9999]) == "low"


def test_a_character_never_seen_is_unknown() -> None:
    assert UNK in bpe.learn(TEXTS, 60).encode("lowé")


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^the text has 16 different characters: allowed are 21 or more tokens$"):
        bpe.learn(TEXTS, 20)


def test_learning_does_not_change_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "true"):
        if value is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        bpe.learn(TEXTS, 60)
        assert os.environ.get("TOKENIZERS_PARALLELISM") == value


def test_the_cache_is_read_the_second_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bpe.learnt(TEXTS, 60)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(bpe, "learn", lambda texts, num_tokens: pytest.fail("learnt again"))
    assert bpe.learnt(TEXTS, 60).serialised() == first.serialised()


def test_other_texts_and_settings_have_other_files(cache: Path) -> None:
    bpe.learnt(TEXTS, 60)
    bpe.learnt(TEXTS, 61)
    bpe.learnt(TEXTS[::-1], 60)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b"x" * 100])
def test_a_damaged_cache_is_made_again(cache: Path, damage: bytes) -> None:
    first = bpe.learnt(TEXTS, 60)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert bpe.learnt(TEXTS, 60).serialised() == first.serialised()
    assert kept.read_bytes() == whole
    kept.write_bytes(whole[:-1] + b" ")
    bpe.learnt(TEXTS, 60)
    assert kept.read_bytes() == whole


def test_learning_works_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bpe.learnt(TEXTS, 60).serialised() == bpe.learn(TEXTS, 60).serialised()


def test_marks_of_subword_nmt_are_undone() -> None:
    assert bpe.undo_marks("ein@@ und@@ zwanzig Kat@@ zen") == "einundzwanzig Katzen"
    assert bpe.undo_marks("am En@@") == "am En"
    assert bpe.undo_marks("a@@b c") == "a@@b c"


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"needs the package tokenizers: pip install \"pipebench\[data\]\"$"):
        bpe.learnt(TEXTS, 60)
