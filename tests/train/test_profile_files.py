"""Runs with times of a `graph.txt`: of whole minibatches only, for a model of the zoo or of the file itself."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.cli.references import load_all
from pipebench.errors import PlanError, ProfileError, RecipeError
from pipebench.model.splitting import unsplit
from pipebench.profile.as_graph import graph_of, work_of
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.load import load_profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.train.job import Job
from pipebench.train.largest_minibatch import largest_minibatch
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.profile_cache import to_plan
from pipebench.train.simulated import simulate_epoch

RECIPE = """
name: small
model: {name: vgg16, width: 0.125, batch_norm: true, num_classes: 10, in_channels: 1, image_size: 32}
dataset: {name: mnist5k}
train: {minibatch_size: 32, max_epochs: 1, optimizer: {name: sgd, lr: 0.02, momentum: 0.9}}
cluster: {name: cluster-a}
parallelism: {mode: pipedream, plan: 3-1}
engine: {kind: simulated}
"""
OF_FILE = RECIPE.replace(RECIPE.split("model: ")[1].split("\n")[0], "{profile: own.graph.txt}")
TRANSLATOR = """
name: small
model: {name: gnmt8, hidden_size: 16, source_vocabulary: 64, target_vocabulary: 64}
dataset: {name: wmt16, vocabulary: 64, num_train: 1024, num_eval: 16, lengths: declared}
train: {minibatch_size: 16, max_epochs: 1, optimizer: {name: adam, lr: 0.02}}
cluster: {name: cluster-a}
parallelism: {mode: dp}
engine: {kind: simulated}
"""
# The artifact's style: inputs of their own, a list of sizes, in-place layers, an output without readers.
ARTIFACT = """node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=4000.0, parameter_size=0.0
node2 -- LSTM(8, 8) -- forward_compute_time=3.0, backward_compute_time=5.0, activation_size=[6400.0; 800.0; 800.0], parameter_size=2304.0
node3 -- __getitem__(0) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=6400.0, parameter_size=0.0
node4 -- __getitem__(1) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=800.0, parameter_size=0.0
node5 -- Linear(8, 8) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=6400.0, parameter_size=256.0
node6 -- ReLU(inplace) -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=6400.0, parameter_size=0.0
node7 -- Linear(8, 4) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=3200.0, parameter_size=128.0
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node5
\tnode5 -- node6
\tnode6 -- node7
"""  # noqa: E501

NAMES = ["node2", "node3", "node5", "node6", "node7"]  # node4 has no reader, and node1 is an input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "file.yaml").write_text(OF_FILE, encoding="utf-8")
    (tmp_path / "own.graph.txt").write_text(ARTIFACT, encoding="utf-8")
    return tmp_path


def job_of(path: Path, *overrides: str) -> Job:
    loaded = load(str(path), list(overrides))
    preflight(loaded)
    return prepare(loaded.recipe, loaded.cluster)


def written(folder: Path) -> str:
    """Return an override that takes the times of a file with those that would be computed."""
    profile = job_of(folder / "own.yaml").profile
    (folder / "times.graph.txt").write_text(write_graph_txt(profile, 32), encoding="utf-8")
    return f"engine.timing={folder / 'times.graph.txt'}"


def test_an_epoch_with_a_graph_txt_has_whole_minibatches_only(folder: Path) -> None:
    """4,000 images in minibatches of 30 leave 10 over; times are the file's, so all minibatches take as long."""
    size = "train.minibatch_size=30"
    profile = job_of(folder / "own.yaml", size).profile
    (folder / "times.graph.txt").write_text(write_graph_txt(profile, 30), encoding="utf-8")
    job = job_of(folder / "own.yaml", size, f"engine.timing={folder / 'times.graph.txt'}")
    sampler = job.setup.sampler
    assert (sampler.num_samples, sampler.minibatches_per_epoch, job.left_over) == (3990, 133, 10)
    assert {sampler.size(k) for k in range(133)} == {30}
    result, _ = simulate_epoch(job)
    sentence = "the 10 samples of an epoch that fill no minibatch aren't run: there are no times for so few"
    assert result.notes["epochs"] == sentence
    assert result.timing.endswith(sentence)
    alike = job_of(folder / "own.yaml", size, "dataset.num_train=3990")
    expected, _ = simulate_epoch(alike)
    for name in ("epoch_time_s", "comm_bytes_total"):  # but for the optimizer, of which the file says nothing
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=0.2)
    assert result.metrics["comm_bytes_total"] == expected.metrics["comm_bytes_total"]


def test_no_samples_are_left_out_if_all_minibatches_are_whole(folder: Path) -> None:
    job = job_of(folder / "own.yaml", written(folder))
    assert job.left_over == 0
    assert not simulate_epoch(job)[0].notes


def test_training_needs_times_for_every_size(folder: Path) -> None:
    profile = job_of(folder / "own.yaml", "train.minibatch_size=30").profile
    (folder / "times.graph.txt").write_text(write_graph_txt(profile, 30), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"has no times for 10 samples, only for 30; nothing is scaled"):
        job_of(
            folder / "own.yaml", "train.minibatch_size=30", f"engine.timing={folder / 'times.graph.txt'}",
            "engine.kind=virtual", "cluster.name=cluster-a",
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["dp", "pipedream", "pipedream-2bw", "hybrid", "model", "spectrain"])
def test_a_model_can_be_a_profile(folder: Path, mode: str) -> None:
    """One worker's epoch takes what the file's times add up to; in every mode as much is computed."""
    whole, _ = simulate_epoch(job_of(folder / "file.yaml", "parallelism={mode: single, plan: auto}"))
    assert whole.metrics["epoch_time_s"] == pytest.approx(125 * (3 + 5 + 2 + 4 + 1 + 1 + 2 + 4) * 1e-3, rel=1e-3)
    job = job_of(folder / "file.yaml", f"parallelism={{mode: {mode}, plan: auto}}")
    forecast = MemoryForecast(job)
    result, _ = simulate_epoch(job, forecast)
    assert result.metrics["epoch_time_s"] < 1.01 * whole.metrics["epoch_time_s"]
    assert result.metrics["peak_memory_bytes_max"] > 0
    busy = 1 - result.metrics["bubble_fraction"]
    assert busy * result.metrics["num_workers"] * result.metrics["epoch_time_s"] == pytest.approx(
        whole.metrics["epoch_time_s"] * (1 - whole.metrics["bubble_fraction"]), rel=1e-6
    )


def test_layers_edges_bytes_and_inputs_equal_the_file_s(folder: Path) -> None:
    job = job_of(folder / "file.yaml", "parallelism={mode: pipedream, plan: 3-1, cuts: [node5]}")
    assert [layer.name for layer in job.setup.graph.layers] == NAMES
    assert job.setup.costs.activation_bytes == {(0, 1): {0: 0, 32: 6400}}
    assert job.setup.costs.stages[0].forward_s[32] == pytest.approx(3e-3)
    # An LSTM keeps what it reads, what it puts out and five times that for gates and cell.
    kept = sum(row.saved_bytes for row in job.profile.layers[32])
    assert kept == (4000 + 6400 + 5 * 6400) + 0 + 6400 + 0 + 3200


def test_a_model_of_a_profile_is_planned(folder: Path) -> None:
    loaded = load(str(folder / "file.yaml"), ["parallelism={mode: pipedream, plan: auto}"])
    known = to_plan(loaded)
    assert known.dataset.num_train == 4000
    assert known.graph is not None
    assert [row.name for row in known.profile.layers[32]] == [*NAMES, "loss"]


def test_a_json_profile_is_a_model_too_at_every_size(folder: Path) -> None:
    own = job_of(folder / "own.yaml", "train.minibatch_size=30")
    (folder / "own.profile.json").write_text(write_profile(own.profile), encoding="utf-8")
    job = job_of(folder / "file.yaml", "train.minibatch_size=30", f"model.profile={folder / 'own.profile.json'}")
    assert load_profile(folder / "own.profile.json").layers == job.profile.layers
    assert job.setup.sampler.num_samples == 4000
    found, expected = simulate_epoch(job)[0].metrics, simulate_epoch(own)[0].metrics
    assert found == pytest.approx(expected)


def test_a_model_of_a_profile_has_the_profile_s_minibatch_lengths(folder: Path) -> None:
    (folder / "own.yaml").write_text(TRANSLATOR, encoding="utf-8")
    own = job_of(folder / "own.yaml")
    (folder / "own.profile.json").write_text(write_profile(own.profile), encoding="utf-8")
    of_file = TRANSLATOR.replace(TRANSLATOR.split("model: ")[1].split("\n")[0], "{profile: own.profile.json}")
    (folder / "file.yaml").write_text(of_file, encoding="utf-8")
    job = job_of(folder / "file.yaml")
    assert len(job.setup.dataset.lengths) > 1
    found, expected = simulate_epoch(job)[0].metrics, simulate_epoch(own)[0].metrics
    assert found["epoch_time_s"] == pytest.approx(expected["epoch_time_s"])


def test_a_model_of_a_profile_names_layers_with_whole_backwards() -> None:
    """Those of kinds that can't be split, by the descriptions; a normalisation's are no loss, and count as split."""
    text = ARTIFACT.replace("-- Linear(8, 4) --", "-- BatchNorm1d(8) --")
    graph = graph_of(work_of(read_graph_txt(text, "own.graph.txt")).layers[1])
    assert unsplit(graph) == "node2 (LSTM(8, 8))"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.kind=virtual"], "model.profile: got a profile, which is for engine.kind simulated: kind virtual"),
        (["engine.kind=distributed"], "model.profile: got a profile, .*: kind distributed trains"),
        (["engine.timing=analytic"], "engine.timing: got analytic, and model.profile has times of its own: allowed is"),
        (["model.profile=3"], "model.profile: got 3, allowed is a profile's file"),
        (["model.name=vgg16"], "model.name: got 'vgg16' beside profile, which says all that is known: allowed is null"),
        (["model.width=0.5"], "model.width: got 0.5 beside profile, which says all that is known: allowed is null"),
        (["model.profile=none.txt"], "model.profile: the profile file .*none.txt' can't be read: No such file"),
    ],
)
def test_unsupported_uses_of_a_profile_are_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        preflight(load(str(folder / "file.yaml"), overrides))
    assert len(caught.value.faults) == 1, str(caught.value)


def test_microbatches_need_times_for_their_size(folder: Path) -> None:
    with pytest.raises(ProfileError, match=r"has no times for 8 samples, only for 32; .*a graph\.txt holds one size"):
        job_of(folder / "file.yaml", "parallelism={mode: gpipe, plan: straight, microbatches: 4}")


def test_a_sweep_of_sizes_with_a_graph_txt_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size of a sweep took the same seconds and bytes: twice the samples had twice the throughput."""
    monkeypatch.chdir(folder)
    why = "own.graph.txt holds one size and doesn't say which: it can't be that of both"
    for command in ("run", "plan"):
        result = CliRunner().invoke(cli, [command, "file.yaml", "train.minibatch_size=16,32"])
        assert result.exit_code == 2
        assert f"train.minibatch_size: got 32, beside 16, and {why}" in " ".join(result.output.split())
    assert len(load_all(["file.yaml"], ["train.minibatch_size=16", "parallelism.depth=1,2"])) == 2
    profile = replace(job_of(folder / "file.yaml").profile, device="V100")
    (folder / "own.graph.txt").write_text(write_profile(profile), encoding="utf-8")
    assert len(load_all(["file.yaml"], ["train.minibatch_size=16,32"])) == 2, "its sizes are looked up"


def test_largest_minibatches_with_a_graph_txt_are_refused(folder: Path) -> None:
    """All sizes fitted, since all had the bytes of the file's."""
    for overrides, key in (([], "model.profile"), ([written(folder)], "engine.timing")):
        loaded = load(str(folder / ("own.yaml" if overrides else "file.yaml")), overrides)
        with pytest.raises(PlanError, match=f"{key}: got a graph.txt, which holds one size and doesn't say which"):
            largest_minibatch(loaded)
