"""Recipes whose stages choose their layers' policies: they plan and train on devices too small for plain PipeDream."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import PlanError, RecipeError
from pipebench.recipe.load import load
from pipebench.schedule.modes import KEEP
from pipebench.train.memory_forecast import MemoryForecast
from tests.train.test_capped import CLUSTER, RECIPE, has_the_bits_of_unlimited_devices, job_of

CHOOSES = "parallelism.vpipe={swap: true, recompute: true, repartition: false}"


def test_a_model_without_a_plan_trains_if_stages_choose(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    with pytest.raises(PlanError, match="no plan of mode pipedream fits"):
        job_of(tmp_path, "1500 kB", ["parallelism.shard=none", "parallelism.recompute=false"])
    job = job_of(tmp_path, "1500 kB", [CHOOSES])
    assert {*job.setup.plan.replicas} == {1}
    assert KEEP in {policy for stage in job.setup.plan.stages for policy in stage.memory}
    assert MemoryForecast(job).out_of_memory == ""
    assert has_the_bits_of_unlimited_devices(tmp_path, job, 1_500_000)


def test_a_plan_names_the_policies_of_activations(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CLUSTER.format(memory="1500 kB"))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    output = CliRunner().invoke(cli, ["plan", str(tmp_path / "recipe.yaml"), CHOOSES]).output
    assert "activations" in output
    assert "recomputed: " in output
    assert "layers kept" in output


def test_a_cluster_without_a_copy_rate_is_refused(tmp_path: Path) -> None:
    lines = CLUSTER.format(memory="1500 kB").splitlines(keepends=True)
    (tmp_path / "small.yaml").write_text("".join(line for line in lines if not line.startswith("pcie")))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    said = "parallelism.vpipe.swap: got true on cluster small, whose file doesn't say how fast devices copy"
    with pytest.raises(RecipeError, match=said):
        load(str(tmp_path / "recipe.yaml"), [CHOOSES])
    load(str(tmp_path / "recipe.yaml"), ["parallelism.vpipe={swap: false, repartition: false}"])
