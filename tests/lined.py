"""Patterns of messages about files, whose names are followed by lines."""

import re


def lined(pattern: str) -> str:
    """Return a pattern of messages that takes a line after each file's name: `r.yaml: ` also means `r.yaml:3: `."""
    return re.sub(r"\.(yaml|json): (?!line )", r".\1(:\\d+)?: ", pattern)
