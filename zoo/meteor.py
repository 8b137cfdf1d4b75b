"""METEOR (Lavie and Agarwal 2007) of captions against several references each, through nltk, without any download."""

from collections.abc import Sequence
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

from pipebench.zoo.late import optional

# How scores are computed, for readers. Differs: PipeDream's and S2VT's scores are by METEOR 1.5, which also matches
# synonyms (WordNet) and paraphrases (tables). Both are downloads, and its weights are tuned for them. And nltk matches
# repeated words from the right, where the 2007 paper takes the alignment with the fewest crossings.
SIGNATURE = (
    "nltk, 2007 parameters (alpha 0.9, beta 3, gamma 0.5), lower case, exact and Porter-stem matchers, no synonyms"
)

Words = Sequence[str]


def require() -> None:
    """Raise ImportError, with one readable sentence, if the package that computes METEOR is missing."""
    _scorer()


def meteor(captions: Sequence[Words], references: Sequence[Sequence[Words]]) -> float:
    """Return the mean METEOR of captions, from 0 to 1; each caption is scored against its best reference.

    A caption equal to a reference scores 1 - 0.5 / words^3, because of the penalty for its one chunk.

    Args:
        captions: words of each caption; one without words scores 0.
        references: for each caption at least one reference's words.

    Raises:
        ImportError: nltk isn't installed.
        ValueError: not one list of references per caption, no caption, or a caption without references.
    """
    if len(captions) != len(references):
        raise ValueError(f"meteor: {len(captions)} captions, {len(references)} lists of references, allowed is equal")
    if not captions or not all(references):
        raise ValueError("meteor: nothing to score, allowed is at least one caption and a reference for each")
    score = _scorer()
    pairs = zip(captions, references, strict=True)
    return float(sum(score(caption, several) for caption, several in pairs) / len(captions))


@cache
def _scorer() -> Any:
    """Return a function of a caption and its references that computes METEOR."""
    with optional("meteor", "nltk"):
        from nltk.stem.porter import PorterStemmer
        from nltk.translate.meteor_score import meteor_score
    # Stemming would take most of the time without a cache, since references repeat words.
    stemmer = SimpleNamespace(stem=lru_cache(maxsize=100_000)(PorterStemmer().stem))
    wordnet = SimpleNamespace(synsets=lambda word: [])  # WordNet's data is a download: no word has synonyms

    def score(caption: Words, references: Sequence[Words]) -> Any:
        return meteor_score(references, caption, stemmer=stemmer, wordnet=wordnet)

    return score
