"""Patterns of messages that name a file and a line."""

import re


def lined(pattern: str) -> str:
    """Return a pattern in which a line may follow each file's name: `r.yaml: ` also matches `r.yaml:3: `."""
    return re.sub(r"\.(yaml|json): (?!line )", r".\1(:\\d+)?: ", pattern)
