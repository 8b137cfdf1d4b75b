"""BLEU of a corpus (Papineni et al., ACL 2002) as sacrebleu computes it, and the signature that makes it comparable.

Scores of different tokenisation or case can't be compared (Post, "A Call for Clarity in Reporting BLEU Scores",
WMT 2018): whoever shows a score shows its signature.
"""

from collections.abc import Sequence
from typing import Any

from pipebench.zoo.late import optional


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> float:
    """Return BLEU, 0 to 100, of detokenised sentences, each against one reference.

    Args:
        hypotheses: what a model wrote.
        references: what a person wrote, in the same order.
        tokenize: sacrebleu's name of how both are split into tokens.
        lowercase: whether case counts for nothing.

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
    scorer.corpus_score(["-"], [["-"]])  # it knows the number of references only then
    return str(scorer.get_signature())


def _scorer(tokenize: str, lowercase: bool) -> Any:
    with optional("BLEU", "sacrebleu"):
        from sacrebleu.metrics.bleu import BLEU
    # force: our own text isn't tokenised, whatever its full stops look like; no advice on the terminal.
    return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
