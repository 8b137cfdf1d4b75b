"""Malformed recipes, thousands of them over time: exit 0 or 2, a sentence per fault, never a traceback."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipebench.cli.main import cli
from tests.recipe.conftest import VALID

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    3,
    1.5,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "3",
    "???",
    "${",
    "${name}",
    "${oc.env:X}",
]
ODD += [
    "a\nb",
    "\x85",
    "\ud800",
    "x" * 300,
    [],
    {},
    [[]],
    [None],
    {"": 1},
    {"a.b": 1},
    {1: 2},
    {"name": {}},
    "../..",
    "/dev/zero",
]
ODD += ["${oc.create:{a: 1}}", "${oc.dict.keys:model}", "${.seed}", "\\${x}", "auto", "straight", "1-1", "local", "sgd"]

scalars = st.one_of(st.sampled_from(ODD), st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def keys_of(data: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    nested = [keys_of(value, (*prefix, key)) for key, value in data.items()] if isinstance(data, dict) else []
    return [prefix, *(key for keys in nested for key in keys)] if prefix else [key for keys in nested for key in keys]


KEYS = keys_of(yaml.safe_load(VALID))
KNOWN = [
    *KEYS,
    ("parallelism", "cuts"),
    ("engine", "threads"),
    ("engine", "timing"),
    ("train", "evaluate_every"),
    ("train", "checkpoint_every"),
    ("extends",),
]


def check_show(content: bytes, *overrides: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("r.yaml").write_bytes(content)
        check_answer(CliRunner().invoke(cli, ["show", "r.yaml", *overrides]))


def check_answer(result: Result) -> None:
    assert result.exit_code in (0, 2), result.output
    assert "Traceback" not in result.output
    if result.exit_code == 2:
        lines = result.stderr.splitlines()
        assert lines
        assert len(lines) == len(set(lines)), "a fault is told twice"
        assert all(line.startswith("pipebench: error: ") and len(line) < 1500 for line in lines), result.stderr
        assert all(line.isprintable() for line in lines)


@FUZZ
@given(st.data())
def test_one_value_replaced(data: st.DataObject) -> None:
    recipe = yaml.safe_load(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        key, value = data.draw(st.sampled_from(KNOWN)), data.draw(values)
        section = recipe
        for part in key[:-1]:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[key[-1]] = value
    check_show(yaml.dump(recipe, allow_unicode=False).encode())


@FUZZ
@given(st.sampled_from(KEYS), st.one_of(st.text(max_size=8), st.integers(), st.none(), st.booleans()))
def test_one_key_renamed_or_dropped(key: tuple[str, ...], new: Any) -> None:
    recipe = yaml.safe_load(VALID)
    section = recipe
    for part in key[:-1]:
        section = section[part]
    value = section.pop(key[-1])
    if new is not None:
        section[new] = value
    check_show(yaml.dump(recipe).encode())


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(VALID)), st.binary(max_size=3), st.integers(0, 5)), max_size=4))
def test_bytes_changed(edits: list[tuple[int, bytes, int]]) -> None:
    content = VALID.encode()
    for position, new, dropped in edits:
        content = content[:position] + new + content[position + dropped :]
    check_show(content)


@FUZZ
@given(st.text(alphabet="{}[]:,-?&*!|>'\"#%@` \n\tab1.~", max_size=60))
def test_yaml_punctuation(text: str) -> None:
    check_show(text.encode())


@FUZZ
@given(st.data())
def test_overrides(data: st.DataObject) -> None:
    key = data.draw(st.one_of(st.sampled_from(KNOWN).map(".".join), st.text(max_size=12)))
    text = data.draw(
        st.one_of(st.text(max_size=20), values.map(lambda value: yaml.dump(value, default_flow_style=True)))
    )
    check_show(VALID.encode(), f"{key.lstrip('-')}={text}")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("key", KNOWN, ids=".".join)
def test_every_odd_value_under(key: tuple[str, ...]) -> None:
    for value in ODD:
        recipe = yaml.safe_load(VALID)
        section = recipe
        for part in key[:-1]:
            section = section.setdefault(part, {})
        section[key[-1]] = value
        check_show(yaml.dump(recipe).encode())
