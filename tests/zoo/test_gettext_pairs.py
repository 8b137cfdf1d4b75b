"""Message pairs: their selection and split, and the errors if something is missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipebench import zoo
from pipebench.zoo import gettext_files, translation
from pipebench.zoo import gettext_pairs as module
from pipebench.zoo.gettext_pairs import GettextPairs, gettext_pairs, keep
from pipebench.zoo.text import BOS, EOS, PAD
from tests.zoo.test_gettext_files import mo

NOUNS = {"file": "Datei", "patch": "Reihe", "branch": "Zweigstelle", "rule": "Regel", "key": "Taste", "line": "Zeile"}
VERBS = {"open": "öffnet", "close": "schließt", "remove": "entfernt", "show": "zeigt", "copy": "kopiert"}
PAIRS = {f"{verb} the {noun}": f"{VERBS[verb]} die {NOUNS[noun]}" for verb in VERBS for noun in NOUNS}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of catalogues with 30 pairs, half in each, and pairs that are left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    folder = tmp_path / "gettext_pairs"
    rows = list(PAIRS.items())
    paths = [folder / name for _, _, name in gettext_files.CATALOGUES]
    for path in paths:
        path.parent.mkdir(parents=True)
    paths[0].write_bytes(mo({"": "Content-Type: charset=UTF-8\n", "open %s": "öffnet %s", **dict(rows[:15])}))
    again = [("Open the file!", "Öffnet die Datei"), *rows[15:]]
    paths[1].write_text("\n\n".join(f'msgid "{a}"\nmsgstr "{b}"' for a, b in again), encoding="utf-8")
    yield folder
    for cached in (module._kept, module._split, translation.encoding, translation.encoded):
        cached.cache_clear()


def small(root: Path | str, num_train: int = 24, num_eval: int = 6, split_seed: int = 0) -> GettextPairs:
    return gettext_pairs(root=str(root), num_train=num_train, num_eval=num_eval, vocabulary=128, split_seed=split_seed)


def texts(dataset: GettextPairs, split: str) -> list[tuple[str, str]]:
    number = dataset.num_train if split == "train" else dataset.num_eval
    sides = ([dataset.text(row) for row in dataset.tokens(side, split, range(number))] for side in ("source", "target"))
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("open %s now", "öffnet %s"),
        ("open {name} now", "öffnet {name}"),
        ("see <b>this</b> page", "siehe Seite"),
        ("set ui.editor first", "erst setzen"),
        ("use --all here", "nutze --all"),
        (":firstline: Any text", "Text"),
        ("an example follows::", "ein Beispiel"),
        ("hg log [-l]", "hg log"),
        ("file", "Datei"),
        ("JSON Export", "json export"),
        ("a b c d e f g h i j k l m", "zu lang"),
        ("too long", "a b c d e f g h i j k l m"),
    ],
)
def test_pairs_that_are_left_out(source: str, target: str) -> None:
    assert keep([(source, target)], 12) == []


def test_lines_are_joined_and_punctuation_is_kept() -> None:
    kept = keep([("Is it\n  \u201ctrue\u201d (really)?", " Ist es \u201ewahr\u201c \u2013 wirklich? ")], 12)
    assert kept == [("Is it \u201ctrue\u201d (really)?", "Ist es \u201ewahr\u201c \u2013 wirklich?")]


def test_no_text_of_either_side_comes_twice() -> None:
    pairs = [("Open it.", "Öffnen."), ("open it", "Aufmachen"), ("Unlock it", "öffnen"), ("Close it", "Schließen")]
    assert keep(pairs, 12) == [pairs[0], pairs[3]]


def test_protocol() -> None:
    dataset = gettext_pairs()
    assert zoo.DATASETS["gettext_pairs"].make is gettext_pairs
    assert {field: tuple(t.shape) for field, t in dataset.example(8).items()} == {
        "source": (8, 18), "source_length": (8,), "target_in": (8, 18), "target_out": (8, 18),
    }  # fmt: skip


def test_every_pair_is_in_one_split_once(root: Path) -> None:
    dataset = small(root)
    dataset.check()
    train, held_out = texts(dataset, "train"), texts(dataset, "eval")
    assert sorted([*train, *held_out]) == sorted(PAIRS.items())
    assert held_out == list(zip(*(dataset.held_out(side, range(6)) for side in ("source", "target")), strict=True))


def test_split_is_a_function_of_its_seed(root: Path) -> None:
    assert texts(small(root), "eval") == texts(small(root), "eval")
    assert set(texts(small(root), "eval")) != set(texts(small(root, split_seed=1), "eval"))
    assert texts(small(root, num_train=10), "eval") == texts(small(root), "eval")


def test_fields_are_framed_and_padded_to_the_longest(root: Path) -> None:
    dataset = small(root)
    rows = dataset.tokens("target", "train", [0, 1, 2])
    fields = dataset.fetch("train", [0, 1, 2], ["target_in", "target_out"])
    width = 1 + max(map(len, rows))
    for row, read, said in zip(rows, fields["target_in"].tolist(), fields["target_out"].tolist(), strict=True):
        assert read == [BOS, *row] + [PAD] * (width - 1 - len(row))
        assert said == [*row, EOS] + [PAD] * (width - 1 - len(row))
    assert dataset.weight("train", [0, 1, 2]) == sum(len(row) + 1 for row in rows)


def test_data_folder_by_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEBENCH_DATA", str(root.parent))
    assert texts(small(""), "eval") == texts(small(root), "eval")


def test_notes_identify_the_data_and_read_none(root: Path, tmp_path: Path) -> None:
    notes = small(root).notes()
    assert notes["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
    assert notes == small(root).notes()
    assert notes != small(root, split_seed=1).notes()
    assert notes["bleu"].startswith(small(tmp_path).notes()["bleu"] + ", pairs ")


def test_too_few_pairs_name_the_options(root: Path) -> None:
    wanted = (
        "^gettext_pairs: 30 pairs of at most 12 words are there, set num_train and num_eval, now 25 and 6, to no more "
        "together, or raise max_words$"
    )
    with pytest.raises(ValueError, match=wanted):
        small(root, num_train=25).check()


def test_missing_catalogues_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^gettext_pairs: mercurial/\S+ and pretalx/\S+ not found in "):
        small(tmp_path).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 127}, "vocabulary is 127, allowed is 128 or more"),
        ({"max_words": 1}, "max_words is 1, allowed is 2 or more"),
        ({"typical_length": 2}, "typical_length is 2, allowed is 3 or more"),
        ({"max_written": 0}, "max_written is 0, allowed is 1 or more"),
        ({"num_train": 0}, "num_train is 0, allowed is 1 or more"),
        ({"num_scored": 201}, r"num_scored is 201, allowed is 0 \(all\) to num_eval, 200"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^gettext_pairs: {message}"):
        gettext_pairs(**options)
