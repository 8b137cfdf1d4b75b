"""How many layers models have: the table of docs/zoo.md against traces, and how far it is from vPipe's."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from pipebench import zoo
from pipebench.model.graph import trace

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
ROW = re.compile(r"^\| (\w+)(?:, (\w+: \d+))? \| ([\d,]+), ([\d,]+) \| ([\d,]+)(?:, ([\d,]+))? \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))
COARSER = ("gnmt8", "gnmt16")  # LSTMs are one layer here


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_page_has_a_table() -> None:
    assert len(ROWS) >= 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}".strip())
def test_layers_and_edges_equal_the_page_s(row: tuple[str, ...]) -> None:
    name, option, layers, edges, published_layers, published_edges = row
    options = dict(OmegaConf.create("{" + option + "}"))
    with torch.device("meta"):
        graph = trace(zoo.MODELS[name].make(**options))
    found = len(graph.layers), sum(len(layer.reads) for layer in graph.layers)
    assert found == (number(layers), number(edges))
    if name not in COARSER:
        assert found[0] == pytest.approx(number(published_layers), rel=0.06)
        assert not published_edges or found[1] == pytest.approx(number(published_edges), rel=0.12)
