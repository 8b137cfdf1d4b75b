"""Faults name the line besides file and key: of every file that a user writes and of its bases."""

import json
from pathlib import Path

import pytest

from pipebench.errors import Fault, RecipeError
from pipebench.extensions.search.trace_file import load_trace
from pipebench.lines import LinedFile
from pipebench.recipe.load import load

RECIPE = """\
extends: base.yaml
train:
  sede: 1
  optimizer:
    lr: 0.1
    momentum: 1.5
cluster: {name: own.yaml,
          servers: 0}
"""
BASE = """\
extends: quickstart
train:
  seed: '3'
"""
CLUSTER = """\
extends: cluster-a
levels:
  - name: server
    flow: 3
"""


def test_every_fault_says_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"r.yaml": RECIPE, "base.yaml": BASE, "own.yaml": CLUSTER}.items():
        Path(name).write_text(text)
    with pytest.raises(RecipeError) as refused:
        load("r.yaml", ["train.streams=0"])
    assert [sentence.partition(", ")[0] for sentence in str(refused.value).splitlines()] == [
        "base.yaml:3: train.seed: got '3'",
        "r.yaml:3: train.sede: unknown key",
        "command line: train.streams: got 0",
        "r.yaml:6: train.optimizer.momentum: got 1.5",
        "r.yaml:8: cluster.servers: got 0",
    ]
    Path("r.yaml").write_text("extends: quickstart\ncluster: {name: own.yaml}\n")
    with pytest.raises(RecipeError, match=r"^r.yaml:2: cluster.name: own.yaml:4: levels.0.flow: got 3, needed is"):
        load("r.yaml")


TEXT = b"""\
rows:
  - name: first.one
    runs: {dp: x,
      more: y}
  - {name: second, "a.b": [1,
      2]}
  - name: m$size
    at: {size: 8}
"""
LINES = {
    "rows": 1, "rows.0": 2, "rows.0.runs.more": 4, "rows[1]['a.b'][1]": 6, "rows.1.a.b.0": 5, "rows.second.a.b": 5,
    "rows.first.one.runs.dp": 3, "rows.0.runs.gone": 3, "rows.m16.at": 8, "rows.7": 1, "'rows'": 1, "gone": None,
    "": None,
}  # fmt: skip


@pytest.mark.parametrize("key", LINES)
def test_a_key_s_line_is_that_of_the_innermost_existing_key(tmp_path: Path, key: str) -> None:
    (tmp_path / "r.yaml").write_bytes(TEXT)
    assert LinedFile("r.yaml", tmp_path / "r.yaml").line_of(key) == LINES[key]


@pytest.mark.parametrize("text", [b"", b"a", b"- 1", b"a: [", b"\xff", b"a: *b", b"? [a]\n: 1", b"[" * 2000])
def test_a_text_without_the_key_has_no_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "r.yaml").write_bytes(text)
    assert str(Fault(LinedFile("r.yaml", tmp_path / "r.yaml"), "a.b", "is wrong")) == "r.yaml: a.b: is wrong"


def test_a_missing_file_or_a_folder_has_no_lines(tmp_path: Path) -> None:
    assert [LinedFile("r", path).line_of("a") for path in (tmp_path / "gone", tmp_path, Path("/dev/zero"))] == 3 * [
        None
    ]


def test_all_faults_of_a_json_file_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"pipebench_search": 2,\n "events": [\n  {"minibatch": -1},\n  {"ad": 1}]}\n')
    with pytest.raises(RecipeError) as refused:
        load_trace(str(path))
    assert [sentence.removeprefix(str(path)) for sentence in str(refused.value).splitlines()] == [
        ":4: events[1]: unknown key 'ad'",
        ":1: pipebench_search: got 2, allowed is 1",
        ":3: events[0].minibatch: got -1, allowed is a whole number from 0 on",
    ]
    path.write_text(json.dumps({"pipebench_search": 1, "events": [{"add": -1}] * 1000}))
    with pytest.raises(RecipeError, match=r"there are 900 more faults$") as refused:
        load_trace(str(path))
    assert len(refused.value.faults) == 101
