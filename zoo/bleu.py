"""BLEU of a corpus (Papineni et al., ACL 2002) as sacrebleu computes it, and its signature.

Scores with different tokenisation or case can't be compared (Post, "A Call for Clarity in Reporting BLEU Scores", WMT
2018), so a score is shown together with its signature.
"""

from collections.abc import Sequence
from typing import Any

from pipebench.zoo.late import optional


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> float:
    """Return BLEU, 0 to 100, of detokenised sentences, each against one reference.

    Args:
        hypotheses: a model's translations.
        references: people's translations, in the same order.
        tokenize: sacrebleu's name of the tokenisation of both.
        lowercase: whether case is ignored.

    Raises:
        ImportError: the package sacrebleu is missing.
        ValueError: no sentences, or not as many references as hypotheses.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"BLEU: {len(hypotheses)} hypotheses and {len(references)} references, allowed are as many of both, not 0"
        )
    return float(_scorer(tokenize, lowercase).corpus_score(list(hypotheses), [list(references)]).score)


def signature(*, tokenize: str = "13a", lowercase: bool = False) -> str:
    """Return sacrebleu's signature of a score with these settings and one reference.

    Raises:
        ImportError: the package sacrebleu is missing.
    """
    scorer = _scorer(tokenize, lowercase)
    scorer.corpus_score(["-"], [["-"]])  # the signature needs the number of references
    return str(scorer.get_signature())


def _scorer(tokenize: str, lowercase: bool) -> Any:
    with optional("BLEU", "sacrebleu"):
        from sacrebleu.metrics.bleu import BLEU
    # force: no warning about text that looks tokenised because of spaces before full stops.
    return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
