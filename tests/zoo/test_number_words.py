"""Number words: the draw, the split, the fields, the encoding's limits."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from num2words import num2words

from pipebench import zoo
from pipebench.zoo import bpe
from pipebench.zoo.number_words import NumberWords, number_words
from pipebench.zoo.text import BOS, EOS, PAD
from pipebench.zoo.translation import copy_baseline

FIELDS = ("source", "source_length", "target_in", "target_out")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "number_words"))


FEW = {"numbers": 500, "num_train": 300, "num_eval": 50, "vocabulary": 96}


def small(split_seed: int = 0) -> NumberWords:
    return number_words(**FEW, split_seed=split_seed)


def numbers_of(dataset: NumberWords, split: str) -> list[int]:
    """Return the numbers of a split, computed from the words of both languages."""
    number = dataset.num_train if split == "train" else dataset.num_eval
    rows = dataset.tokens("target", split, range(number))
    return [german_numbers()[dataset.text(row)] for row in rows]


@cache
def german_numbers() -> dict[str, int]:
    return {num2words(n, lang="de"): n for n in range(10_000)}


def test_protocol_and_sizes() -> None:
    dataset = number_words()
    dataset.check()
    assert (dataset.num_train, dataset.num_eval) == (4000, 400)
    assert zoo.DATASETS["number_words"].make is number_words


@pytest.mark.parametrize("split_seed", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_defaults_fit_other_draws(split_seed: int) -> None:
    number_words(split_seed=split_seed).check()


def test_splits_share_no_number_and_repeat_none() -> None:
    dataset = number_words()
    train, held_out = numbers_of(dataset, "train"), numbers_of(dataset, "eval")
    assert len({*train, *held_out}) == 4400
    assert max(train) >= 9_900


def test_both_sides_say_the_same_number() -> None:
    dataset = small()
    english = dataset.held_out("source", range(50))
    german = dataset.held_out("target", range(50))
    numbers = numbers_of(dataset, "eval")
    assert english == [num2words(n, lang="en") for n in numbers]
    assert german == [num2words(n, lang="de") for n in numbers]
    sources = [dataset.text(row) for row in dataset.tokens("source", "eval", range(50))]
    assert sources == english


def test_split_is_a_function_of_its_seed() -> None:
    assert numbers_of(small(), "eval") == numbers_of(small(), "eval")
    assert numbers_of(small(), "eval") != numbers_of(small(split_seed=1), "eval")


def test_every_minibatch_has_the_shape_of_the_example() -> None:
    dataset = number_words()
    example = dataset.example(2)
    assert all(tensor.is_meta for tensor in example.values())
    for indices in ([0, 1], [399, 7]):
        fetched = dataset.fetch("eval", indices, FIELDS)
        for field in FIELDS:
            assert (fetched[field].shape, fetched[field].dtype) == (example[field].shape, torch.int64)
        assert int(fetched["source"].max()) < 128


def test_rows_are_framed() -> None:
    dataset = small()
    (tokens,) = dataset.tokens("target", "train", [3])
    fields = dataset.fetch("train", [3], FIELDS)
    width = fields["target_in"].shape[1]
    assert fields["target_in"][0].tolist() == [BOS, *tokens, *[PAD] * (width - len(tokens) - 1)]
    assert fields["target_out"][0].tolist() == [*tokens, EOS, *[PAD] * (width - len(tokens) - 1)]
    length = int(fields["source_length"][0])
    assert fields["source"][0, 0] == BOS
    assert fields["source"][0, length - 1] == EOS
    assert fields["source"][0, length:].eq(PAD).all()


def test_the_encoding_is_learnt_on_training_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt_on: list[str] = []

    def learnt(texts: Sequence[str], num_tokens: int) -> bpe.BytePairEncoding:
        learnt_on.extend(texts)
        return bpe.learn(texts, num_tokens)

    monkeypatch.setattr(bpe, "learnt", learnt)
    dataset = small(split_seed=77)
    train = [num2words(n, lang=language) for language in ("en", "de") for n in numbers_of(dataset, "train")]
    assert learnt_on == train


def test_too_narrow_columns_are_named() -> None:
    dataset = number_words(target_columns=5)
    with pytest.raises(
        ValueError, match=r"^number_words: a target has \d+ tokens, set target_columns, now 5, to that or"
    ):
        dataset.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": 4399}, r"numbers is 4399, allowed is num_train \+ num_eval = 4400 to 1000000"),
        ({"numbers": 1_000_001}, "numbers is 1000001, allowed is"),
        ({"vocabulary": 47}, "vocabulary is 47, allowed is 48 or more"),
        ({"num_train": 0}, "num_train is 0, allowed is 1 or more"),
        ({"num_eval": 0}, "num_eval is 0, allowed is 1 or more"),
        ({"source_columns": 2}, "source_columns is 2, allowed is 3 or more"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, allowed is 0 to below 1"),
        ({"num_scored": 401}, r"num_scored is 401, allowed is 0 \(all\) to num_eval, 400"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^number_words: {message}"):
        number_words(**options)


def test_wrong_split() -> None:
    with pytest.raises(ValueError, match="split is 'test', allowed are train, eval"):
        small().fetch("test", [0], ["source"])


def test_copying_is_a_poor_translation() -> None:
    dataset = number_words()
    assert 10 < copy_baseline(dataset) < 25
    assert dataset.bleu(dataset.held_out("target", range(400))) == pytest.approx(100)
    assert "tok:char" in dataset.notes()["bleu"]


def test_another_process_has_the_same_data_and_loads_packages_late(tmp_path: Path) -> None:
    """Hash seeds and the number of threads have no influence; the process has another cache, so it learns again."""
    code = (
        f"import sys, zoo; dataset = zoo.DATASETS['number_words'].make(**{FEW}); dataset.example(2)\n"
        "assert not {'num2words', 'tokenizers', 'sacrebleu'} & set(sys.modules)\n"
        f"print([f.tolist() for f in dataset.fetch('train', range(300), {FIELDS}).values()])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "4", "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = small().fetch("train", range(300), FIELDS)
    assert run.stdout.strip() == str([field.tolist() for field in here.values()])


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    wanted = r"^number_words needs the package num2words: pip install \"pipebench\[data\]\"$"
    with pytest.raises(ImportError, match=wanted):
        number_words(split_seed=987).check()


def test_a_missing_package_for_scores_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ImportError, match=r"^BLEU needs the package sacrebleu"):
        number_words().check()
