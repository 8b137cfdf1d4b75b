"""The planner's choices to save memory are trained, recorded and resumed as if the recipe had them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipebench.errors import PlanError, RecipeError
from pipebench.planner.plans import Request
from pipebench.recipe.load import load
from pipebench.recipe.plan_file import parse_plan_file
from pipebench.recipe.suited import unshared
from pipebench.run.deciding import decision_of
from pipebench.schedule.modes import MODES
from pipebench.schedule.syncs import OPTIMIZER
from pipebench.train.job import Job
from pipebench.train.metrics import recipe_notes
from pipebench.train.prepare import prepare
from pipebench.train.request import plan_request
from tests.support import make_engine, parameters_of

RECIPE = """\
name: wide
model: {target: "tests.train.test_memory_choices:wide"}
dataset: {name: synthetic, shape: [1, 4, 4], num_classes: 4, num_train: 64}
train: {minibatch_size: 8, optimizer: {name: adam, lr: 0.01}, max_epochs: 1}
cluster: {name: two.yaml}
parallelism: {mode: hybrid}
"""
TWO = """\
device: {value: V100, assumed: a test}
memory: {value: 1 MB, assumed: a test}
levels:
  - name: server
    count: {value: 2, assumed: a test}
    bandwidth: {value: 1000000 GB/s, assumed: a test}
    latency: {value: 0 us, assumed: a test}
"""


def wide() -> nn.Module:
    """Return a small classifier whose weights take more memory than its activations."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 4))


def job_of(folder: Path, *words: str, **how: object) -> Job:
    (folder / "two.yaml").write_text(TWO)
    (folder / "recipe.yaml").write_text(RECIPE)
    loaded = load(str(folder / "recipe.yaml"), list(words))
    return prepare(loaded.recipe, loaded.cluster, **how)  # type: ignore[arg-type]


BOUND = "cluster.memory=200 kB"  # data parallelism needs more, and two stages are slower


def trained(job: Job) -> dict[str, torch.Tensor]:
    engine = make_engine(job.setup)
    engine.train(0, 6)
    return parameters_of(engine)


def test_a_chosen_shard_is_trained_reported_and_resumed(tmp_path: Path) -> None:
    """The same bits as without shards, which needs more memory, and as when the recipe asks for it."""
    job = job_of(tmp_path, BOUND)
    assert job.recipe.parallelism.shard == job.setup.pipeline.shard == OPTIMIZER
    assert recipe_notes(job)["plan"] == "shard: optimizer, chosen as the fastest of what fits in memory"
    found = trained(job)
    for shard in ("none", "optimizer"):
        written = job_of(tmp_path, BOUND, "parallelism.plan=2", f"parallelism.shard={shard}")
        assert not written.chosen
        for name, value in trained(written).items():
            assert torch.equal(found[name], value)
    decision = decision_of(job)
    assert parse_plan_file(decision.plan.text(), "plan.json") == decision.plan
    again = job_of(tmp_path, BOUND, decision=decision)
    assert (again.setup.pipeline, again.setup.plan, again.chosen) == (job.setup.pipeline, job.setup.plan, job.chosen)


def test_a_recipe_with_shards_or_enough_memory_gets_no_choice(tmp_path: Path) -> None:
    assert not job_of(tmp_path).chosen
    whole = job_of(tmp_path, BOUND, "parallelism.shard=none", "parallelism.recompute=false")
    assert (whole.chosen, whole.setup.pipeline.shard, str(whole.setup.plan)) == ("", "none", "straight")
    with pytest.raises(PlanError, match="; with shard: optimizer, recompute: true none fits either"):
        job_of(tmp_path, "cluster.memory=100 kB")


@pytest.mark.parametrize("word", ["engine.channels_last=true", "engine.compile=true"])
def test_incompatible_choices_are_left_out_for_layouts_and_compiled_stages(tmp_path: Path, word: str) -> None:
    request = plan_request_of(tmp_path, BOUND, word)
    assert bool(request.may_shard) == ("compile" in word)
    assert request.may_recompute == ("compile" not in word)


def plan_request_of(folder: Path, *words: str) -> Request:
    job = job_of(folder, "cluster.memory=1 GB")
    (folder / "two.yaml").write_text(TWO)
    loaded = load(str(folder / "recipe.yaml"), list(words))
    return plan_request(loaded.recipe, loaded.cluster, job.profile, job.setup.dataset)


def test_a_plan_file_has_the_choice(tmp_path: Path) -> None:
    form = decision_of(job_of(tmp_path, BOUND)).plan
    path = tmp_path / "plan.json"
    path.write_text(form.text())
    named = f"parallelism.plan={path}"
    assert job_of(tmp_path, named).setup.pipeline.shard == OPTIMIZER
    with pytest.raises(PlanError, match=r"shard: got optimizer, allowed is none: with engine\.channels_last"):
        job_of(tmp_path, named, "engine.channels_last=true")
    with pytest.raises(RecipeError, match="shard: got 'optimizer', allowed are none"):
        job_of(tmp_path, named, "parallelism.shard=none")
    path.write_text(replace(form, shard="parameters").text())
    with pytest.raises(RecipeError, match="shard: got 'parameters', allowed are none, optimizer"):
        job_of(tmp_path, named)
    path.write_text(replace(form, mode="pipedream").text())
    with pytest.raises(PlanError, match="shard: got optimizer, allowed is none: without a flush no replica knows"):
        job_of(tmp_path, named, "parallelism.mode=pipedream", "train.optimizer.clip_norm=1.0")


KEYS: list[tuple[str, ...]] = [
    (),
    ("train.optimizer.clip_norm=1.0",),
    ("train.precision=fp16",),
    ("train.optimizer={name: asgd, lr: 0.1}",),
    ("parallelism.vpipe={swap: true}",),
    ("parallelism.sync=parameter-server",),
]


@pytest.mark.parametrize("mode", [name for name, row in MODES.items() if row.shape not in ("one", "one-stage")])
def test_refused_combinations_are_not_chosen(tmp_path: Path, mode: str) -> None:
    """Of what is allowed without shards, what rules refuse with them, and no more."""
    (tmp_path / "two.yaml").write_text(TWO)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    for keys in KEYS:
        words = [f"parallelism.mode={mode}", *keys]
        try:
            recipe = load(str(path), words).recipe
        except RecipeError:  # whatever replicas share out
            continue
        try:
            load(str(path), [*words, "parallelism.shard=optimizer"])
            is_refused = False
        except RecipeError:
            is_refused = True
        assert (unshared(recipe, recipe.parallelism.row) is not None) is is_refused, words
