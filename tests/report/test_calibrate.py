"""Calibration finds the constants with which the simulator made a report's published values."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import PipebenchError, RecipeError
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.report.calibrate import Calibrated, calibrate, find_site, with_values, write_value
from pipebench.report.calibrating import calibration_text
from pipebench.report.definition import Constant
from pipebench.report.load import load_report
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch

FLOW, RING = 0.44, 2.5  # GB/s, with which the published values are made

CLUSTER = """\
# cluster-a with two numbers that are fitted
extends: cluster-a
levels:
  - name: server
    # what NCCL reaches
    ring: {value: RING GB/s, assumed: "a guess: NCCL on PCIe"}
  - name: cluster
    flow: {value: FLOW GB/s, assumed: a guess}
    latency: {value: 60 us, assumed: stays}
"""
REPORT = """\
title: Made by the simulator
columns:
  ideal: {}
  met: {clusters: {cluster-a: mine.yaml}}
measures:
  speedup: {unit: x, value: dp.epoch_time_s / pipedream.epoch_time_s}
rows:
  - name: vgg16
    runs: {dp: vgg16/4x4-a-dp, pipedream: vgg16/4x4-a-pipedream}
    published: {speedup: VGG}
  - name: alexnet
    runs: {dp: alexnet/4x4-a-dp, pipedream: alexnet/4x4-a-pipedream}
    published: {speedup: ALEXNET}
  - name: inside
    runs: {dp: alexnet/1x4-a-dp, pipedream: alexnet/1x4-a-straight}
    published: {speedup: INSIDE}
  - name: same
    runs: {dp: alexnet/1x4-a-dp, pipedream: alexnet/1x4-a-dp}
    published: {speedup: 1.0}
    by_construction: {speedup: both are data parallelism}
calibration:
  column: met
  constants:
    ring: {cluster: mine.yaml, key: levels.server.ring, from: 0.5 GB/s, to: 9 GB/s}
    flow: {cluster: mine.yaml, key: levels.cluster.flow, from: 0.1 GB/s, to: 1.1 GB/s}
  fitted_on: {ring: [inside.speedup], flow: [vgg16.speedup, alexnet.speedup]}
"""


def cluster_text(ring: float, flow: float) -> str:
    return CLUSTER.replace("RING", f"{ring:g}").replace("FLOW", f"{flow:g}")


def speedup(dp: str, pipedream: str, cluster: Path) -> float:
    times = []
    for recipe in (dp, pipedream):
        loaded = load(recipe, ["engine.kind=simulated", f"cluster.name={cluster}"])
        result, _ = simulate_epoch(prepare(loaded.recipe, loaded.cluster, trains=False))
        times.append(result.metrics["epoch_time_s"])
    return times[0] / times[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report beside a cluster with other constants than those that made its published values."""
    folder = tmp_path_factory.mktemp("made")
    true = folder / "true.yaml"
    true.write_text(cluster_text(RING, FLOW))
    text = REPORT
    for word, recipes in {
        "VGG": ("vgg16/4x4-a-dp", "vgg16/4x4-a-pipedream"),
        "ALEXNET": ("alexnet/4x4-a-dp", "alexnet/4x4-a-pipedream"),
        "INSIDE": ("alexnet/1x4-a-dp", "alexnet/1x4-a-straight"),
    }.items():
        text = text.replace(word, repr(speedup(*recipes, true)))
    (folder / "made.yaml").write_text(text)
    (folder / "mine.yaml").write_text(cluster_text(6.0, 0.9))
    return folder / "made.yaml"


@pytest.fixture(scope="module")
def calibrated(made: Path) -> Calibrated:
    report, asked = load_report(made)
    return calibrate(report, asked, lambda _: None, lambda: None)


def test_the_constants_that_made_the_published_values_are_found(calibrated: Calibrated) -> None:
    assert calibrated.fitted == {
        "ring": pytest.approx(RING * 1e9, rel=0.01), "flow": pytest.approx(FLOW * 1e9, rel=0.01)
    }  # fmt: skip
    assert calibrated.values[("vgg16", "speedup")] == pytest.approx(
        calibrated.report.row("vgg16").published["speedup"].value, rel=0.01
    )


def test_every_cell_that_can_be_left_out_is_predicted_from_the_others(calibrated: Calibrated) -> None:
    """Both cells of the flow were made with one flow, so each gives it alone; the ring has one cell."""
    for row in ("vgg16", "alexnet"):
        published = calibrated.report.row(row).published["speedup"].value
        assert calibrated.left_out[(row, "speedup")] == pytest.approx(published, rel=0.01)
    assert calibrated.left_out[("inside", "speedup")] is None


def test_the_split_is_printed_with_its_errors(calibrated: Calibrated) -> None:
    text = calibration_text(calibrated)
    [flow] = re.findall(r"(?m)^\| flow \| mine \| cluster\.flow \| 0\.9 GB/s \| (.*) GB/s \| (.*) \|$", text)
    assert float(flow[0]) == pytest.approx(FLOW, rel=0.01)
    assert flow[1] == "vgg16.speedup, alexnet.speedup"
    kinds = re.findall(r"(?m)^\| (\w+)\.speedup \| \S+ \| ([a-z ]+) \|", text)
    assert kinds == [("vgg16", "fitted"), ("alexnet", "fitted"), ("inside", "fitted"), ("same", "by construction")]
    assert re.search(r"\| fitted on \| 3 \| 0\.\d% \|", text)
    assert "| predicted | 0 |" in text
    assert re.search(r"\| all, each left out of the fit \| 2 \| 0\.\d% \|", text)


def test_only_the_numbers_and_their_sources_are_written(made: Path) -> None:
    report, _ = load_report(made)
    assert report.calibration is not None
    for constant, value in zip(report.calibration.constants, (3.456789e9, 0.5e9), strict=True):
        write_value(find_site(constant, made.parent), value, "made")
    written = (made.parent / "mine.yaml").read_text()
    before = cluster_text(6.0, 0.9).replace(
        '{value: 6 GB/s, assumed: "a guess: NCCL on PCIe"}',
        '{value: 3.46 GB/s, calibrated: "on inside.speedup of made: NCCL on PCIe"}',
    )
    assert written == before.replace(
        "{value: 0.9 GB/s, assumed: a guess}",
        '{value: 0.5 GB/s, calibrated: "on vgg16.speedup, alexnet.speedup of made"}',
    )
    levels = load_cluster(str(made.parent / "mine.yaml"), 1).levels
    assert (levels[0].ring_bytes_per_s, levels[1].flow_bytes_per_s) == (3.46e9, 0.5e9)
    (made.parent / "mine.yaml").write_text(cluster_text(6.0, 0.9))


def test_constants_of_other_clusters_change_nothing(made: Path) -> None:
    report, _ = load_report(made)
    assert report.calibration is not None
    sites = [find_site(constant, made.parent) for constant in report.calibration.constants]
    cluster = load_cluster("cluster-b", 2)
    assert with_values(cluster, sites, {"ring": 1.0, "flow": 1.0}) == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "servers.ring"}, r"key: got 'servers.ring', allowed is levels.NAME.KEY, launch, pause"),
        ({"key": "pause"}, r"mine.yaml has no line pause: \{value: ..., ...\} of its own$"),
        ({"key": "launch"}, r"key: .*mine.yaml has no line launch"),
        ({"key": "levels.server.rings"}, r"key: got 'rings', allowed are .*did you mean 'ring'"),
        ({"key": "levels.rack.ring"}, r"key: got 'rack', allowed are server, cluster"),
        ({"key": "levels.server.p2p"}, r"has no line p2p: \{value: ..., ...\} of its own at level server"),
        ({"low": "7 parsecs"}, r"from, to: got '7 parsecs', allowed is a bandwidth"),
        ({"low": "7 GB/s"}, r"from, to: got 7 GB/s to 9 GB/s, needed are two numbers above 0 around 6 GB/s"),
        ({"cluster": "mine2.yaml"}, "no such (file|cluster)"),
    ],
)
def test_constants_that_cannot_be_fitted_are_refused_in_one_sentence(
    made: Path, change: dict[str, str], message: str
) -> None:
    given = {"name": "ring", "cluster": "mine.yaml", "key": "levels.server.ring", "low": "1 GB/s", "high": "9 GB/s"}
    with pytest.raises((PipebenchError, RecipeError), match=message):
        find_site(Constant(**given | change, fitted_on=()), made.parent)


PAUSING = """\
# cluster-a whose devices pause
extends: cluster-a
pause: {value: PAUSE us, assumed: "a guess: how long"}
"""
PAUSED = """\
title: Made by the simulator
columns: {ideal: {}, met: {clusters: {cluster-a: paused.yaml}}}
measures: {epoch: {unit: s, value: run.epoch_time_s}}
rows:
  - {name: alexnet, runs: {run: alexnet/1x4-a-dp}, published: {epoch: EPOCH}}
calibration:
  column: met
  constants: {pause: {cluster: paused.yaml, key: pause, from: 1 us, to: 9 ms}}
  fitted_on: {pause: [alexnet.epoch]}
"""


def test_the_command_finds_a_pause_after_kernels_and_writes_it_if_asked(tmp_path: Path) -> None:
    """Every fit is of a profile of its own, since what hosts take is in the times of layers."""
    cluster = tmp_path / "paused.yaml"
    cluster.write_text(PAUSING.replace("PAUSE", "400"))
    loaded = load("alexnet/1x4-a-dp", ["engine.kind=simulated", f"cluster.name={cluster}"])
    made, _ = simulate_epoch(prepare(loaded.recipe, loaded.cluster, trains=False))
    cluster.write_text(PAUSING.replace("PAUSE", "90"))
    (tmp_path / "made.yaml").write_text(PAUSED.replace("EPOCH", repr(made.metrics["epoch_time_s"])))
    found = CliRunner().invoke(cli, ["calibrate", str(tmp_path / "made.yaml"), "--write"])
    assert found.exit_code == 0, found.output
    assert re.search(r"(?m)^\| pause \| paused \| pause \| 90 us \| (39\d|40\d) us \| alexnet.epoch", found.output)
    assert "all, each left out of the fit" in found.output
    assert load_cluster(str(cluster), 1).pause_s == pytest.approx(400e-6, rel=0.02)
    report, _ = load_report(tmp_path / "made.yaml")
    assert report.calibration is not None
    write_value(find_site(report.calibration.constants[0], tmp_path), 123.4e-6, "made")
    assert 'pause: {value: 123 us, calibrated: "on alexnet.epoch of made: how long"}' in cluster.read_text()
    with pytest.raises(
        PipebenchError, match="from, to: got 0 us to 1 ms, needed are two numbers above 0 around 123 us"
    ):
        find_site(Constant("pause", "paused.yaml", "pause", "0 us", "1 ms", ()), tmp_path)


def test_a_report_without_constants_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(REPORT.partition("calibration:")[0].replace("mine.yaml", "cluster-a-2019")
                    .replace("VGG", "1").replace("ALEXNET", "1").replace("INSIDE", "1"))  # fmt: skip
    found = CliRunner().invoke(cli, ["calibrate", str(path)])
    assert found.exit_code == 2
    assert "plain: has no calibration" in found.output
