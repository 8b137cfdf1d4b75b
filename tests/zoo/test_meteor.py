"""METEOR of captions counted by hand, with the formula of Lavie and Agarwal (2007)."""

import sys

import pytest

from pipebench.zoo import meteor as module
from pipebench.zoo.meteor import meteor


def words(*sentences: str) -> list[list[str]]:
    return [sentence.split() for sentence in sentences]


def score(caption: str, *references: str) -> float:
    return meteor(words(caption), [words(*references)])


def by_formula(matches: int, caption: int, reference: int, chunks: int) -> float:
    """Recall weighs nine times as much as precision; half is lost where every match is a chunk of its own."""
    precision, recall = matches / caption, matches / reference
    f_mean = 10 * precision * recall / (recall + 9 * precision)
    return f_mean * (1 - 0.5 * (chunks / matches) ** 3)


@pytest.mark.parametrize(
    ("caption", "reference", "matches", "chunks"),
    [
        ("a five creeps left", "a five creeps left", 4, 1),
        ("a five creeps left", "a six creeps left", 3, 2),
        ("a five creeps left", "left creeps a five", 4, 3),
        ("a man is riding", "a man rides one big horse", 3, 2),  # rides and riding share the stem ride
        ("a five", "a five creeps left", 2, 1),
        ("A Five creeps", "a five creeps", 3, 1),
    ],
)
def test_counted_by_hand(caption: str, reference: str, matches: int, chunks: int) -> None:
    expected = by_formula(matches, len(caption.split()), len(reference.split()), chunks)
    assert score(caption, reference) == pytest.approx(expected, rel=1e-12)


def test_synonyms_are_not_matched() -> None:
    """WordNet has car and automobile in one set; its data isn't used, even where it is installed."""
    assert score("car", "automobile") == 0
    assert score("car", "cars") == pytest.approx(0.5)


def test_repeated_words_are_paired_from_the_end() -> None:
    """What the module says differs from METEOR, which would pair the first `a` and count one chunk."""
    assert score("a man", "a man rides a horse") == pytest.approx(by_formula(2, 2, 5, chunks=2))


def test_best_reference_counts_and_captions_are_averaged() -> None:
    assert score("a five", "nothing like it", "a five") == score("a five", "a five")
    both = meteor(words("a five", "a six"), [words("a five"), words("seven")])
    assert both == pytest.approx(score("a five", "a five") / 2)


def test_empty_caption_scores_nothing() -> None:
    assert score("", "a five") == 0


def test_the_same_every_time() -> None:
    captions, references = (
        words("a b a b c", "the cats run", "x"),
        [words("b a c a b"), words("a cat runs"), words("y")],
    )
    first = meteor(captions, references)
    assert first > 0
    assert all(meteor(captions, references) == first for _ in range(3))


@pytest.mark.parametrize(
    ("captions", "references", "message"),
    [
        (words("a"), [], "1 captions, 0 lists of references"),
        ([], [], "nothing to score"),
        (words("a"), [[]], "a reference for each"),
    ],
)
def test_nothing_to_score(captions: list[list[str]], references: list[list[list[str]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        meteor(captions, references)


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk.stem.porter", None)
    module._scorer.cache_clear()
    with pytest.raises(ImportError, match=r'^meteor needs the package nltk: pip install "pipebench\[data\]"$'):
        module.require()
    monkeypatch.undo()
    module.require()
