"""From a recipe to an engine's setup; models, data and plans that don't fit together are one sentence."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

from pipebench.cli.main import cli
from pipebench.errors import GraphError, PlanError, ProfileError, RecipeError
from pipebench.planner import searches
from pipebench.recipe.catalog import recipes_folder
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.recipe.schema import Recipe
from pipebench.run import runner
from pipebench.train import profiled_model
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from pipebench.train.profile_cache import to_plan
from pipebench.train.profiled_model import profile_model
from tests.recipes import uniform_recipe

TEXT = """\
name: text
model: {name: awd_lm, vocabulary: 500, embedding_size: 8, hidden_size: 12, num_layers: 2}
dataset: {name: king_james, bptt: 10, train_tokens: 4000, eval_tokens: 300, vocabulary: 500}
train: {minibatch_size: 4, streams: 2, optimizer: {lr: 1}, max_epochs: 1}
cluster: {name: cluster-a}
parallelism: {mode: pipedream}
engine: {kind: simulated}
"""
PAIRS = """\
name: pairs
model: {name: gnmt8, hidden_size: 8, source_vocabulary: 128, target_vocabulary: 128}
dataset: {name: number_words}
train: {minibatch_size: 4, optimizer: {lr: 1}, max_epochs: 1}
cluster: {name: cluster-a}
parallelism: {mode: single}
engine: {kind: simulated}
"""
MODELS = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Mute(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.head = nn.Embedding(128, 4), nn.Linear(4, width)

    def forward(self, source, source_length, target_in):
        read = self.table(source).sum(1, True) * source_length[:, None, None]
        return self.head(self.table(target_in) + read)

def mute():
    return Mute(128)

def few():
    model = Mute(120)
    model.translate = print
    return model

def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

def edges():
    model = normed()
    model.register_buffer("edges", torch.eye(4).to_sparse())
    return model

def points(num_train: int):
    data = TensorDataset(torch.randn(num_train, 4), torch.zeros(num_train, dtype=torch.long))
    return data, TensorDataset(*data[:12])
"""
NORMED = """\
name: normed
model: {target: "models:normed"}
dataset: {target: "models:points", num_train: 48, loss: cross_entropy}
train: {minibatch_size: 12, optimizer: {lr: 1}, max_epochs: 1}
cluster: {name: cluster-a}
parallelism: {mode: gpipe, microbatches: 2}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)  # of another test's folder
    (tmp_path / "text.yaml").write_text(TEXT)
    (tmp_path / "pairs.yaml").write_text(PAIRS)
    (tmp_path / "normed.yaml").write_text(NORMED)
    (tmp_path / "models.py").write_text(MODELS)
    named = "model: {name: gnmt8, hidden_size: 8, source_vocabulary: 128, target_vocabulary: 128}"
    for name in ("mute", "few"):
        (tmp_path / f"{name}.yaml").write_text(PAIRS.replace(named, f"model: {{target: 'models:{name}'}}"))
    return tmp_path


def prepare_with(name: str, *overrides: str) -> Job:
    recipe = load(f"{name}.yaml", list(overrides)).recipe
    return prepare(recipe, load_cluster(recipe.cluster.name, recipe.cluster.servers))


@pytest.mark.usefixtures("project")
class TestPlansForText:
    @pytest.mark.parametrize("streams", [1, 2, 3, 4])
    def test_every_stages_replicas_divide_the_streams(self, streams: int) -> None:
        recipe = load("text.yaml", [f"train.streams={streams}"]).recipe
        setup = prepare(recipe, load_cluster("cluster-a", 1)).setup
        assert all(streams % r == 0 for r in setup.plan.replicas)
        assert setup.sampler.streams == setup.held_out.streams == streams

    def test_straight_plans_are_found_for_long_models_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where cuts are so many that given shapes aren't tried, the search of any width alone tears streams apart."""
        monkeypatch.setattr(searches, "MOST_CUTS_OF_SHAPES", 1)
        for streams in (1, 2, 3):
            recipe = load("text.yaml", [f"train.streams={streams}"]).recipe
            setup = prepare(recipe, load_cluster("cluster-a", 1)).setup
            assert all(streams % r == 0 for r in setup.plan.replicas)

    def test_mode_auto_leaves_out_modes_without_such_a_plan(self) -> None:
        recipe = load("text.yaml", ["parallelism.mode=auto", "train.streams=3"]).recipe
        comparison = prepare(recipe, load_cluster("cluster-a", 1)).comparison
        assert comparison is not None
        assert "train.streams is 3 with plan 4" in comparison.refused["dp"]
        assert comparison.best.plan.mode != "dp"

    def test_a_plan_that_tears_a_stream_apart_is_refused(self) -> None:
        """Where validation can't see it: the plan is given after the recipe was checked."""
        recipe = load("text.yaml").recipe
        torn = replace(recipe, parallelism=replace(recipe.parallelism, plan="3-1"))
        with pytest.raises(PlanError, match=r"train.streams: got 2 with plan 3-1, .* allowed are multiples of 3"):
            prepare(torn, load_cluster("cluster-a", 1))

    def test_an_epoch_is_what_whole_rows_hold(self) -> None:
        """403 chunks in 2 x 4 rows of 50."""
        setup = prepare(load("text.yaml", ["dataset.train_tokens=4030"]).recipe, load_cluster("cluster-a", 1)).setup
        assert (setup.dataset.num_train, setup.sampler.num_samples) == (403, 400)


@pytest.mark.usefixtures("project")
class TestModelsThatDoNotFitTheData:
    def test_too_few_rows_in_an_embedding(self) -> None:
        with pytest.raises(PlanError, match="embedding embedding of the model has 400 rows, and tokens of dataset kin"):
            prepare_with("text", "model.vocabulary=400")
        with pytest.raises(PlanError, match="embedding source_embedder of the model has 64 rows, and source of"):
            prepare_with("pairs", "model.source_vocabulary=64")

    def test_too_few_logits(self) -> None:
        with pytest.raises(ProfileError, match="the model has 120 outputs, and target_out of NumberWords has 128 diff"):
            prepare_with("few")

    @pytest.mark.parametrize("name", ["small/resnet50/single", "small/alexnet/dp", "alexnet/single"])
    def test_too_few_classes(self, name: str) -> None:
        recipe = load(name, ["model.num_classes=5", "engine.kind=simulated"]).recipe
        with pytest.raises(ProfileError, match=r"the model has 5 outputs, and label of .* different ids"):
            prepare(recipe, load_cluster(recipe.cluster.name, recipe.cluster.servers))

    def test_a_model_that_cannot_write(self) -> None:
        with pytest.raises(PlanError, match="number_words scores what the model writes, and Mute has no method transl"):
            prepare_with("mute")


@pytest.mark.usefixtures("project")
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["dataset.num_train=49"], "the last minibatch of an epoch has 1 of 12 samples: choose another train.mini"),
        (
            ["train.minibatch_size=11", "dataset.num_train=44", "parallelism.microbatches=1"],
            "the last minibatch of an evaluation has 1",
        ),
        (["parallelism.microbatches=12"], "some microbatches have 1 sample: choose a larger train.minibatch_size or"),
    ],
)
def test_minibatches_that_leave_batch_norm_one_sample_are_reported(overrides: list[str], said: str) -> None:
    """Torch says only that it is impossible, and not which key of the recipe makes it so."""
    prepare_with("normed")
    with pytest.raises(ProfileError, match=f"Expected more than 1 value per channel .*; {said}"):
        prepare_with("normed", *overrides)


@pytest.mark.usefixtures("project")
def test_batch_norm_is_planned_if_only_other_modes_leave_it_one_sample() -> None:
    """A recipe that trains had no plan: others cut its minibatch of as many samples as there are workers."""
    keys = [
        "train.minibatch_size=4",
        "dataset.num_train=48",
        "parallelism.mode=pipedream",
        "parallelism.microbatches=1",
    ]
    loaded = load("normed.yaml", keys)
    assert {*to_plan(loaded).profile.layers} == {4}


def test_plans_and_simulations_make_no_weights_and_read_no_data() -> None:
    recipe = load("vgg16/4x4-a-pipedream").recipe
    made = profile_model(recipe, load_cluster(recipe.cluster.name, recipe.cluster.servers))
    assert all(parameter.is_meta for parameter in made.graph.root.parameters())
    assert sum(parameter.numel() for parameter in made.graph.root.parameters()) == 138_357_544


def test_data_are_required_if_times_are_measured(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    (project / "box.yaml").write_text((recipes_folder() / "clusters" / "local.yaml").read_text())
    for cluster in ("local", str(project / "box.yaml")):
        loaded = load("awd_lm/1x4-a-dp", [f"cluster.name={cluster}", "train.streams=8"])
        with pytest.raises(RecipeError, match="ptb: no folder is given"):
            preflight(loaded, trains=False)
        result = CliRunner().invoke(cli, ["draw", "awd_lm/1x4-a-dp", f"cluster.name={cluster}", "train.streams=8"])
        assert isinstance(result.exception, RecipeError) or result.exit_code == 2
    preflight(load("awd_lm/1x4-a-dp"), trains=False)


def test_drawing_makes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    make = profiled_model.initial_model

    def watched(recipe: Recipe, device: str) -> nn.Module:
        devices.append(device)
        return make(recipe, device)

    monkeypatch.setattr(profiled_model, "initial_model", watched)
    assert "stage 3" in runner.draw(load("small/gnmt8/pipedream"))
    assert devices == ["meta"]


def test_cuts_name_the_borders_of_all_stages_of_interleaved_workers(tmp_path: Path) -> None:
    """Validation counted one stage per worker: it refused cuts that fit, and let through some that are too few."""
    (tmp_path / "deep.yaml").write_text(uniform_recipe(8, 3072, 8, minibatch_size=32))
    asked = ["parallelism={mode: interleaved, plan: 1-1, cuts: [layer1, layer3, layer6]}", "engine.kind=simulated"]
    loaded = load(str(tmp_path / "deep.yaml"), asked)
    plan = prepare(loaded.recipe, loaded.cluster).setup.plan
    assert ([stage.start for stage in plan.stages], plan.chunks) == ([0, 1, 3, 6], 2)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (0,), (1,)]
    backwards = replace(loaded.recipe.parallelism, cuts=["layer3", "layer1", "layer6"])
    problem = (
        "parallelism.cuts: got layer3, layer1, layer6, which is out of order: layers run as layer1, layer3, layer6"
    )
    with pytest.raises(PlanError, match=problem):
        prepare(replace(loaded.recipe, parallelism=backwards), loaded.cluster)


def test_averages_of_a_target_are_not_of_shards() -> None:
    shards = "parallelism={mode: dp, plan: 4, shard: gradients}"
    loaded = load("quickstart", [shards, "train.optimizer={name: null, target: 'torch.optim:ASGD', momentum: null}"])
    problem = "train.optimizer.target: got torch.optim:ASGD with shard gradients, and evaluations need its averages"
    with pytest.raises(PlanError, match=problem):
        prepare(loaded.recipe, loaded.cluster)


@pytest.mark.usefixtures("project")
def test_the_whole_model_can_be_a_layer_where_nothing_is_cut() -> None:
    class_of_all = "model.leaves=[Sequential]"
    job = prepare_with("normed", class_of_all, "parallelism={mode: dp, plan: 4, microbatches: 1}")
    assert [layer.kind for layer in job.setup.graph.layers] == ["Sequential"]
    for mode in ("gpipe", "pipedream", "auto"):
        problem = f"model.leaves: got Sequential, the whole model, and mode {mode} cuts it: use single or dp"
        with pytest.raises(GraphError, match=problem):
            prepare_with("normed", class_of_all, f"parallelism={{mode: {mode}, microbatches: 1}}")


@pytest.mark.usefixtures("project")
def test_sparse_tensors_are_refused() -> None:
    """0.2.0: an internal error."""
    problem = r"Sequential holds edges, a tensor of layout torch.sparse_coo: let it be dense \(x.to_dense\(\)\)"
    with pytest.raises(GraphError, match=problem):
        prepare_with("normed", "model.target=models:edges")
