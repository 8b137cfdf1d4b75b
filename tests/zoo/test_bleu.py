"""BLEU against hand-made counts, and its signature."""

import math
import sys

import pytest

from pipebench.zoo.bleu import corpus_bleu, signature

REFERENCE = "the cat sat on the old mat"


def test_equal_text_scores_100() -> None:
    assert corpus_bleu([REFERENCE], [REFERENCE]) == pytest.approx(100)


def test_by_hand() -> None:
    """5 of 5, 4 of 4, 3 of 3, 2 of 2 n-grams match; 5 words against 7 cost exp(1 - 7/5)."""
    assert corpus_bleu(["the cat sat on the"], [REFERENCE]) == pytest.approx(100 * math.exp(1 - 7 / 5))


def test_counts_are_summed_over_the_corpus() -> None:
    """7 + 3 of 7 + 4 words match, 6 + 2 of 6 + 3 pairs, 5 + 1 of 5 + 2, 4 + 0 of 4 + 1: not the mean of sentences."""
    expected = 100 * math.prod([10 / 11, 8 / 9, 6 / 7, 4 / 5]) ** 0.25
    assert corpus_bleu([REFERENCE, "a b c x"], [REFERENCE, "a b c d"]) == pytest.approx(expected)


def test_case_and_tokens() -> None:
    assert corpus_bleu([REFERENCE.upper()], [REFERENCE]) == 0
    assert corpus_bleu([REFERENCE.upper()], [REFERENCE], lowercase=True) == pytest.approx(100)
    assert corpus_bleu(["einundzwanzig"], ["einundzwanzig"], tokenize="char") == pytest.approx(100)
    assert corpus_bleu(["einundzwanzig"], ["einundzwanzig"]) == 0  # one word: no four in a row


def test_signature_names_what_matters() -> None:
    assert signature().startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert signature(tokenize="intl", lowercase=True).startswith("nrefs:1|case:lc|eff:no|tok:intl|smooth:exp|version:")


@pytest.mark.parametrize(("hypotheses", "references"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_unequal_corpora_are_refused(hypotheses: list[str], references: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"^BLEU: {len(hypotheses)} hypotheses and {len(references)} references"):
        corpus_bleu(hypotheses, references)


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ImportError, match=r"^BLEU needs the package sacrebleu: pip install \"pipebench\[data\]\"$"):
        signature()
