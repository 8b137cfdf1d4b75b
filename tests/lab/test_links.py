"""The cluster that `pipebench links` writes for wires of a known bandwidth. `nox -s lab` runs it: it needs root."""

import os
from pathlib import Path

import pytest

from pipebench.recipe.clusters import load_cluster
from tests.lab import launcher
from tests.lab.hosts import Lab
from tests.lab.machine import needs_a_lab
from tests.lab.wires import EFFICIENCY

pytestmark = [needs_a_lab, pytest.mark.lab]


@pytest.mark.parametrize("bandwidth", [1.25e7, 1.25e8])
@pytest.mark.parametrize("workers_per_host", [1, 2])
def test_the_payload_bandwidth_of_a_wire_is_measured(
    bandwidth: float, workers_per_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one connection takes all of it or two share it; some 4% are acknowledgements of what comes back."""
    monkeypatch.chdir(tmp_path)
    with Lab(2) as lab:
        lab.limit(bandwidth)
        log = Path("log")
        assert launcher.run(lab, workers_per_host, ["pipebench", "links", "--out", "ours.yaml"], log) == 0, (
            log.read_text() + os.linesep
        )
    *inside, wire = load_cluster("ours.yaml", 1).levels
    assert len(inside) == workers_per_host - 1
    assert (wire.name, wire.count) == ("cluster", 2)
    expected = bandwidth * EFFICIENCY
    rates = (wire.bandwidth_bytes_per_s, wire.flow_bytes_per_s, wire.ring_bytes_per_s)
    assert all(0.88 * expected < rate < 1.02 * expected for rate in rates if rate is not None)
    assert all(level.bandwidth_bytes_per_s > 2 * expected for level in inside)
