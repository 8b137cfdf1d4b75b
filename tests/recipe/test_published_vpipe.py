"""The recipes under `vpipe/` agree with Tables 2 and 3 of vPipe (TPDS'21), and the cluster with section 6."""

from fractions import Fraction
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipebench.recipe.catalog import recipe_names
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.train.prepare import prepare

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "vpipe_tpds21.yaml"
FOLDERS = {
    "vgg16": "vgg16",
    "gnmt16": "gnmt",
    "transformer": "transformer",
    "bert": "bert",
    "resnet50": "resnet50",
    "amoebanet": "amoebanet",
}
SYSTEMS = {"gpipe": "g", "gpipe-vpipe": "gv", "pipedream": "p", "pipedream-vpipe": "pv"}


@cache
def entries() -> dict[str, Any]:
    return {entry["id"]: entry["values"] for entry in yaml.safe_load(PUBLISHED.read_text())["entries"]}


def test_every_model_has_a_recipe_of_every_system() -> None:
    found = {name.removeprefix("vpipe/") for name in recipe_names() if name.startswith("vpipe/")}
    found = {name for name in found if not name.startswith("search/")} - {"transformer/pipedream-repartitioned"}
    assert found == {f"{folder}/{system}" for folder in FOLDERS for system in SYSTEMS}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_recipe_agrees_with_its_rows_of_tables_2_and_3(folder: str, system: str) -> None:
    recipe, settings = load(f"vpipe/{folder}/{system}").recipe, entries()[f"t2-{FOLDERS[folder]}"]
    optimizer = recipe.train.optimizer
    assert (str(optimizer.name), optimizer.lr) == (settings["optimizer"].lower(), settings["learning_rate"])
    row = entries().get(f"t3-{FOLDERS[folder]}-{SYSTEMS[system]}")
    assert row is None or recipe.train.minibatch_size == row["batch"]


@pytest.mark.parametrize(
    "folder", [pytest.param(f, marks=() if f in ("vgg16", "resnet50") else pytest.mark.slow) for f in FOLDERS]
)
def test_stages_have_the_layers_of_table_2_in_proportion(folder: str) -> None:
    loaded, settings = load(f"vpipe/{folder}/pipedream"), entries()[f"t2-{FOLDERS[folder]}"]
    plan = prepare(loaded.recipe, loaded.cluster, trains=False).setup.plan
    num_layers = plan.stages[-1].stop
    published = settings["default_partition"]
    assert sum(published) == settings["layers"]
    ends = [round(Fraction(end * num_layers, settings["layers"])) for end in accumulate(published)]
    assert [stage.stop for stage in plan.stages[:-1]] == ends[:-1]
    assert sum(plan.replicas) == entries()["default-gpus"]["gpus"]


def test_the_testbed_agrees_with_section_6() -> None:
    cluster, testbed = load_cluster("vpipe", 8), entries()["testbed"]
    server, whole = cluster.levels
    assert (server.count, whole.count, cluster.device) == (testbed["gpus_per_host"], testbed["hosts"], "2080 Ti")
    assert cluster.memory_bytes == testbed["gpu_memory_gb"] * 10**9
    assert server.bandwidth_bytes_per_s == testbed["pcie_mb_per_s"] * 1e6
    assert whole.bandwidth_bytes_per_s == testbed["network_gbps"] * 1e9 / 8
    assert 2 * whole.latency_s == pytest.approx(testbed["ping_ms"] / 1e3)
