from pathlib import Path

import pytest

from pipebench.recipe.clusters import load_cluster
from tests.lab.cluster_file import cluster_text


@pytest.mark.parametrize("workers_per_host", [1, 4])
def test_a_lab_is_a_cluster(tmp_path: Path, workers_per_host: int) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(cluster_text(1.25e7, 4e-6, workers_per_host))
    cluster = load_cluster(str(path), 3)
    assert cluster.num_workers == 3 * workers_per_host
    assert cluster.device == "local"
    wire = cluster.levels[-1]
    assert (wire.name, wire.count, wire.bandwidth_bytes_per_s, wire.latency_s) == ("wire", 3, 1.25e7, 4e-6)
    assert wire.goodput_bytes_per_s == pytest.approx(1.25e7 * 1448 / 1514)
    local = load_cluster("local", 1)
    assert cluster.pcie_bytes_per_s == local.pcie_bytes_per_s is not None  # layers may swap there
    inside = local.levels[0]
    for level in cluster.levels[:-1]:
        assert level.count == workers_per_host
        assert (level.bandwidth_bytes_per_s, level.latency_s) == (inside.bandwidth_bytes_per_s, inside.latency_s)
    assert len(cluster.levels) == (1 if workers_per_host == 1 else 2)
