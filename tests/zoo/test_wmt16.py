"""WMT16 from small files of MLPerf's layout: selection, buckets, padding, detokenisation and scores."""

import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from pipebench import zoo
from pipebench.zoo import line_index
from pipebench.zoo import wmt16 as module
from pipebench.zoo.text import BOS, EOS, PAD, UNK
from pipebench.zoo.translation import copy_baseline
from pipebench.zoo.wmt16 import Wmt16, wmt16
from pipebench.zoo.wmt16_segments import Wmt16Segments, wmt16_segments

FIELDS = ("source", "source_length", "target_in", "target_out")
WORDS = [f"w{i}" for i in range(20)]
VOCABULARY = [*WORDS, "Kat@@", "zen", "Katze", "und", ",", "sü@@", "ß", "cats", "and", "&quot;", "."]
# Training pairs of 3, 48, 49 and 10 source tokens; the third is past MLPerf's 50 with begin and end, the fourth too.
SOURCES = ["cats and w0", " ".join(["w1"] * 48), " ".join(["w2"] * 49), " ".join(["w3"] * 10), "w4"]
TARGETS = ["Kat@@ zen und w0 .", "w1", "w2", " ".join(["w3"] * 49), " ".join(["w4"] * 18)]
HELD_OUT_SOURCES = ["cats , cats and cats .", "&quot; w5 &quot; never seen"]
HELD_OUT_TARGETS = ["Kat@@ zen , Katze und Kat@@ zen .", "&quot; sü@@ ß &quot; ."]
REFERENCES = ["Katzen, Katze und Katzen.", '"süß".']


def write(folder: Path, name: str, lines: Sequence[str]) -> None:
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "wmt16"
    folder.mkdir()
    write(folder, "train.tok.clean.bpe.32000.en", SOURCES)
    write(folder, "train.tok.clean.bpe.32000.de", TARGETS)
    write(folder, "newstest2014.tok.bpe.32000.en", HELD_OUT_SOURCES)
    write(folder, "newstest2014.tok.bpe.32000.de", HELD_OUT_TARGETS)
    write(folder, "newstest2014.de", REFERENCES)
    write(folder, "vocab.bpe.32000", VOCABULARY)
    return folder


def small(root: Path | str, num_train: int = 3, num_eval: int = 2, vocabulary: int = 40) -> Wmt16:
    return wmt16(root=str(root), num_train=num_train, num_eval=num_eval, vocabulary=vocabulary)


class Dictionary(nn.Module):
    """Translates by a dictionary from sources to translations."""

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.known = known
        self.weight = nn.Parameter(torch.zeros(1))

    def translate(self, source: torch.Tensor, source_length: torch.Tensor, *, max_length: int) -> list[list[int]]:
        assert max_length == 149  # and begin: MLPerf's 150
        rows = [tuple(row[:n].tolist()) for row, n in zip(source, source_length.tolist(), strict=True)]
        return [self.known[row] for row in rows]


def test_declared_sizes_equal_mlperf_s_and_need_no_file() -> None:
    dataset = wmt16()
    assert (dataset.num_train, dataset.num_eval, dataset.options.vocabulary) == (3_498_161, 3003, 32_320)
    assert zoo.DATASETS["wmt16"].make is wmt16
    example = dataset.example(64)
    assert all(tensor.is_meta for tensor in example.values())
    assert {field: tuple(tensor.shape) for field, tensor in example.items()} == {
        "source": (64, 30), "source_length": (64,), "target_in": (64, 30), "target_out": (64, 30),
    }  # fmt: skip


def test_declared_lengths_follow_a_log_normal_with_the_published_share_of_short_pairs() -> None:
    """By a sum over its density: 3,498,161 of 4,068,191 pairs have at most 50 tokens; minibatches are 30 wide."""
    mean, deviation, step = 3.341, 0.654, 0.001

    def share(most: float) -> float:
        xs = [step * (i + 0.5) for i in range(round(most / step))]
        return sum(math.exp(-(((math.log(x) - mean) / deviation) ** 2) / 2) / x for x in xs)

    tops = (9, 19, 29, 39, 50)
    below = [0.0, *(share(top + 0.5) for top in tops)]
    assert below[-1] / share(80.5) == pytest.approx(3_498_161 / 4_068_191, abs=1e-3)
    lengths = wmt16(lengths="declared").lengths
    assert tuple(each.columns for each in lengths) == tops
    for each, (a, b) in zip(lengths, itertools.pairwise(below), strict=True):
        assert each.share == pytest.approx((b - a) / below[-1], abs=1e-4)
    assert sum(each.columns * each.share for each in lengths) == pytest.approx(30, abs=0.05)
    assert wmt16().lengths == ()


def test_declared_lengths_equal_the_buckets_lengths() -> None:
    dataset = wmt16(lengths="declared", max_length=33)
    assert [each.columns for each in dataset.lengths] == [6, 13, 20, 27, 33]
    assert dataset.of_length(9).example(3)["target_in"].shape == (3, 9)
    assert dataset.example(3)["source"].shape == (3, 30), "of another object"


def test_the_layout_is_accepted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(root).check()
    monkeypatch.setenv("PIPEBENCH_DATA", str(root.parent))
    small("").check()


def test_pairs_too_long_on_a_side_are_left_out(root: Path) -> None:
    """Pairs of 50 tokens with begin and end are used, of 51 aren't: the first, second and fifth pair are left."""
    dataset = small(root)
    found = dataset.tokens("source", "train", range(3))
    assert [len(row) for row in found] == [3, 48, 1]
    assert [len(row) for row in dataset.tokens("target", "train", range(3))] == [5, 1, 18]


def test_buckets_are_a_fifth_of_the_length_wide(root: Path) -> None:
    """Lengths 7, 50 and 20 with begin and end, over a width of 10: 0, 5 (of which there is none: 4), 2."""
    assert list(small(root).buckets()) == [0, 4, 2]


def test_tokens_are_numbered_in_the_vocabularys_order(root: Path) -> None:
    dataset = small(root)
    ids = {word: 4 + position for position, word in enumerate(VOCABULARY)}
    assert dataset.tokens("source", "train", [0]) == [[ids["cats"], ids["and"], ids["w0"]]]
    assert dataset.tokens("source", "eval", [1]) == [[ids["&quot;"], ids["w5"], ids["&quot;"], UNK, UNK]]


def test_a_minibatch_is_as_wide_as_its_longest_sentence(root: Path) -> None:
    dataset = small(root)
    fields = dataset.fetch("train", [0, 2], FIELDS)
    assert fields["source"].tolist() == [[BOS, 31, 32, 4, EOS], [BOS, 8, EOS, PAD, PAD]]
    assert fields["source_length"].tolist() == [5, 3]
    assert fields["target_in"].shape == fields["target_out"].shape == (2, 19)
    assert fields["target_in"][0].tolist() == [BOS, 24, 25, 27, 4, 34] + [PAD] * 13
    assert fields["target_out"][0].tolist() == [24, 25, 27, 4, 34, EOS] + [PAD] * 13
    assert dataset.fetch("train", [2], ["source"])["source"].shape == (1, 3)


def test_weight_is_the_number_of_target_tokens(root: Path) -> None:
    dataset = small(root)
    for split, indices in (("train", [0, 1, 2]), ("train", [2]), ("eval", [1, 0])):
        written = dataset.fetch(split, indices, ["target_out"])["target_out"]
        assert dataset.weight(split, indices) == int((written != PAD).sum())


def test_only_the_requested_side_is_read(root: Path) -> None:
    dataset = small(root)
    dataset.weight("train", [0])  # both files are scanned once, before one goes
    expected = dataset.fetch("train", [0, 1], ["source", "source_length"])
    target = root / "train.tok.clean.bpe.32000.de"
    content = target.read_bytes()
    state = target.stat()
    target.write_bytes(b"\n" * len(content))
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
    again = dataset.fetch("train", [0, 1], ["source", "source_length"])
    assert all(torch.equal(again[field], expected[field]) for field in expected)
    assert int(dataset.fetch("train", [0], ["target_in"])["target_in"].max()) == BOS


def test_the_index_is_stored_and_made_anew_when_files_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[Path] = []
    scan = line_index.scan

    def counted(path: Path) -> line_index.LineIndex:
        scans.append(path)
        return scan(path)

    monkeypatch.setattr(line_index, "scan", counted)
    module._pairs.cache_clear()
    small(root).tokens("source", "train", [0])
    assert len(scans) == 2
    module._pairs.cache_clear()
    small(root).tokens("source", "train", [0])
    assert len(scans) == 2
    for kept in (root.parent / "cache" / "pipebench" / "wmt16").iterdir():
        kept.write_bytes(kept.read_bytes()[:-10])
    module._pairs.cache_clear()
    assert len(small(root).tokens("source", "train", range(3))) == 3
    assert len(scans) == 4
    write(root, "train.tok.clean.bpe.32000.en", ["w0 w0", *SOURCES[1:]])
    assert small(root).tokens("source", "train", [0]) == [[4, 4]]
    assert len(scans) == 6


def test_construction_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    small("/nowhere").example(3)
    small("").example(3)


def test_sentences_are_detokenised(root: Path) -> None:
    dataset = small(root)
    for index, reference in enumerate(REFERENCES):
        (ids,) = dataset.tokens("target", "eval", [index])
        assert dataset.text(ids) == reference
    assert dataset.held_out("target", [1, 0]) == REFERENCES[::-1]
    assert dataset.held_out("source", [0]) == ["cats, cats and cats."]
    assert dataset.text([BOS, 26, UNK, EOS, PAD, 39]) == "Katze <unk>"


def test_bleu_of_the_whole_model(root: Path) -> None:
    """A perfect model scores 100, one that copies less, in batches of which the last has one sentence."""
    dataset = small(root)
    sources = dataset.tokens("source", "eval", range(2))
    targets = dataset.tokens("target", "eval", range(2))
    framed = [(BOS, *row, EOS) for row in sources]
    perfect = Dictionary(dict(zip(framed, targets, strict=True)))
    assert dataset.whole_model_metrics(perfect) == {"bleu": pytest.approx(100)}
    copying = Dictionary(dict(zip(framed, sources, strict=True)))
    assert dataset.whole_model_metrics(copying)["bleu"] < 20
    assert copy_baseline(dataset) < 20
    assert dataset.notes()["bleu"].startswith("nrefs:1|case:lc|eff:no|tok:intl|smooth:exp|")


@pytest.mark.parametrize("name", ["vocab.bpe.32000", "newstest2014.de", "train.tok.clean.bpe.32000.en"])
def test_a_missing_file_is_one_sentence(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"has no {name}; expected is what MLPerf's GNMT preparation leaves: "):
        small(root).check()


def test_a_missing_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"^wmt16: .*nothing is no folder; expected is one with train\.tok"):
        small(tmp_path / "nothing").check()
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"^wmt16: no folder is given, set its option root, or PIPEBENCH_DATA to"
    ):
        small("").check()


def test_other_sizes_name_the_option_to_set(root: Path) -> None:
    for dataset, message in (
        (small(root, num_train=4), "^wmt16: 3 train pairs are there, set num_train, now 4, to that$"),
        (small(root, num_eval=3), "^wmt16: 2 eval pairs are there, set num_eval, now 3, to that$"),
        (small(root, vocabulary=48), r"^wmt16: vocab\.bpe\.32000 makes 40 token ids, set vocabulary, now 48, to that$"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.check()


def test_sides_of_unequal_length_are_refused(root: Path) -> None:
    write(root, "train.tok.clean.bpe.32000.de", TARGETS[:-1])
    with pytest.raises(ValueError, match=r"has 5 lines and train\.tok\.clean\.bpe\.32000\.de 4, expected is one per"):
        small(root).check()
    write(root, "train.tok.clean.bpe.32000.de", TARGETS)
    write(root, "newstest2014.de", REFERENCES[:1])
    with pytest.raises(ValueError, match=r"newstest2014\.de has 1 lines, expected is one for each of 2 pairs"):
        small(root).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "max_length is 4, allowed is 5 or more"),
        ({"max_written": 0}, "max_written is 0, allowed is 1 or more"),
        ({"typical_length": 51}, "typical_length is 51, allowed is 3 to max_length, 50"),
        ({"lengths": "varied"}, "lengths is 'varied', allowed are fixed, declared"),
        ({"lengths": "declared", "typical_length": 40}, "typical_length is 40, which lengths: declared doesn't use"),
        ({"vocabulary": 32_317}, "vocabulary is 32317, allowed is a multiple of 8"),
        ({"num_train": 0}, "num_train is 0, allowed is 1 or more"),
        ({"num_scored": 3004}, r"num_scored is 3004, allowed is 0 \(all\) to num_eval, 3003"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1, allowed is 0 to below 1"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^wmt16: {message}"):
        wmt16(**options)


def test_missing_package_is_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module._detokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    wanted = r"^wmt16 needs the package sacremoses: pip install \"pipebench\[data\]\"$"
    with pytest.raises(ImportError, match=wanted):
        small(root).check()


def segments(root: Path, **given: int) -> Wmt16Segments:
    sizes = {"train_sentences": 3, "eval_sentences": 3, "vocabulary": 40, "sentences": 1}
    return wmt16_segments(root=str(root), **(sizes | given))


def test_segments_are_of_any_text(root: Path) -> None:
    """The check named num_train, an option of `wmt16`, and required the published German sentences."""
    write(root, "newstest2014.tok.bpe.32000.en", [*HELD_OUT_SOURCES, "w7"])
    write(root, "newstest2014.tok.bpe.32000.de", [*HELD_OUT_TARGETS, "w7"])
    (root / "newstest2014.de").unlink()
    dataset = segments(root)
    dataset.check()
    assert (dataset.num_train, dataset.num_eval, dataset.options.mask) == (2, 2, 39)
    fetched = dataset.fetch("train", [0], ["tokens", "words"])
    assert fetched["tokens"].max() < 40
    for option, given, there in (("train_sentences", 9, "3 train"), ("eval_sentences", 9, "3 eval")):
        with pytest.raises(ValueError, match=f"^wmt16: {there} pairs are there, set {option}, now 9, to that"):
            segments(root, **{option: given}).check()
    with pytest.raises(ValueError, match=r"^wmt16: 2 train pairs are there, set train_sentences, now 3, to that"):
        segments(root, max_length=20).check()


def test_the_mask_of_segments_is_not_in_the_vocabulary(root: Path) -> None:
    for language in ("en", "de"):
        write(root, f"newstest2014.tok.bpe.32000.{language}", ["w1", "w2", "w3"])
    write(root, "newstest2014.de", ["w1", "w2", "w3"])
    write(root, "vocab.bpe.32000", [f"w{i}" for i in range(36)])
    small(root, num_eval=3).check()
    with pytest.raises(ValueError, match="makes 48 token ids, set vocabulary, now 40, to that"):
        segments(root).check()
