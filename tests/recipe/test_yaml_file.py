"""What libyaml reads is what PyYAML's own scanner reads: all that is shipped, and pieces of it with mistakes."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipebench.recipe.yaml_file import _READ_IN_PYTHON, _Loader, parse

ROOT = Path(__file__).parents[2]
SHIPPED = [path.read_text() for folder in ("recipes", "reports") for path in sorted(ROOT.glob(f"{folder}/**/*.yaml"))]
DIFFERENT = ["name: a\tb", "{plan: strai?ght}", "|#", ">-#", "!", "- é", "a: \x85"]
INSERTED = [*"{}[]:,-#&*|>'\"@`~ \n=<.0e", "---", "...", ": ", "- ", "|\n", "yes", "0x1", "<<: ", "''"]


def by_python(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError):
        return ValueError


def by_pipebench(text: str) -> Any:
    try:
        return parse(text)
    except ValueError:
        return ValueError


def test_shipped_files_are_read_by_libyaml_with_the_same_data() -> None:
    assert sum(_READ_IN_PYTHON.search(text) is None for text in SHIPPED) > 0.9 * len(SHIPPED) > 300
    for text in SHIPPED[::5]:
        assert repr(by_pipebench(text)) == repr(by_python(text))


@pytest.mark.parametrize("text", DIFFERENT)
def test_what_libyaml_reads_otherwise_is_read_in_python(text: str) -> None:
    assert _READ_IN_PYTHON.search(text)
    assert repr(by_pipebench(text)) == repr(by_python(text))


def test_texts_with_mistakes_are_read_or_refused_alike() -> None:
    draw = random.Random(0)
    texts = [text for text in SHIPPED if len(text) < 2000]
    num_read = 0
    for _ in range(300):
        lines = draw.choice(texts).split("\n")
        start = draw.randrange(len(lines))
        text = "\n".join(lines[start : start + draw.randrange(1, 9)])
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(INSERTED) + text[at + draw.choice([0, 0, 1]) :]
        found = by_pipebench(text)
        assert repr(found) == repr(by_python(text)), text
        num_read += found is not ValueError
    assert 100 < num_read < 290
