"""Counts of compared recipes: agreeing, refused and failing."""

import re
from collections import Counter


class Tally:
    """The results of comparing random recipes.

    Args:
        seed: that recipes are drawn from.

    Attributes:
        agreed: number of recipes whose results agree, by mode.
        refused: number of recipes that can't be compared, by reason.
        failures: a report for each recipe whose results differ.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.agreed = Counter[str]()
        self.refused = Counter[str]()
        self.failures = list[str]()

    @property
    def num_compared(self) -> int:
        return self.agreed.total() + len(self.failures)

    @property
    def refused_share(self) -> float:
        """The share of the recipes that were drawn."""
        return self.refused.total() / max(1, self.refused.total() + self.num_compared)

    def refuse(self, error: Exception) -> None:
        """Count a recipe that can't be compared; numbers and names are removed from the reason."""
        self.refused[re.sub(r"\S*recipe\.yaml(:\d+)?: |[\d'\[\]]+", "", str(error))[:60]] += 1

    def fail(self, report: str) -> None:
        """Keep and print the report about a recipe whose results differ."""
        self.failures.append(report)
        print(report, flush=True)

    def summary(self, how: str) -> str:
        """Return the counts as lines; `how` says what recipes agree with."""
        lines = [f"seed {self.seed}: {self.agreed.total()} recipes agree {how}, {len(self.failures)} don't"]
        lines += [f"  {mode}: {count}" for mode, count in sorted(self.agreed.items())]
        lines += [f"refused: {self.refused.total()}, {self.refused_share:.0%} of those drawn; most often"]
        return "\n".join([*lines, *(f"  {count} x {reason}" for reason, count in self.refused.most_common(5))])
