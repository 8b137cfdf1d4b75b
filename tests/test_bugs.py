"""One test per bug that got as far as a commit or a review; the comment names the mechanism."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.distributed.engine import DistributedEngine
from pipebench.engine.protocols import UnitLoss
from pipebench.errors import Fault, ProfileError
from pipebench.extensions.moves.engine import moves_of
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.simulated_engine import SimulatedEngine
from pipebench.model.graph import trace
from pipebench.planner.planner import Planner
from pipebench.profile import measure
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe import users_code
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.drawing import draw_cells
from pipebench.tracking.connection import reason_of
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.request import plan_request
from tests.engine.test_migration_memory import setup_of as moving_setup
from tests.models import SkipNet
from tests.recipe.conftest import VALID
from tests.support import Blobs, make_engine, make_setup, unit_profile
from tests.train.test_simulated_search import job as searching_job


def test_short_group_of_a_replicated_flush_deadlocked() -> None:
    """0.1.0: in a group short of minibatches replica 0 of stage 0 had twice its siblings' share.

    With the warm-ups of a full group, stage 1 waited for a forward that stood behind a backward that waited for
    stage 1.
    """
    pipeline = Pipeline((4, 1, 3, 3), chain(4), "1f1b", True, 3, microbatches=3)
    rows = draw_cells(pipeline, 17, [1] * 4, [1] * 4)
    assert sum(cell.startswith("B") for cell in rows[4]) == 17 * 3


def test_idle_replicas_were_left_out_of_the_ring() -> None:
    """0.1.0: the ring ran as soon as the first waiter was played, with the members that had joined so far.

    Replicas without a minibatch in a short round join in their wait, which is played later: sums were right, bytes
    were those of a smaller ring.
    """
    setup = make_setup(SkipNet(), ([], [3]), dataset=Blobs(num_train=46))
    engine = make_engine(setup)
    engine.train(0, 1)
    weights = sum(bucket.num_bytes for bucket in setup.costs.stages[0].buckets)
    assert engine.num_bytes[ALL_REDUCE, "server"] == 2 * (3 - 1) * weights
    assert all(
        torch.equal(r.weights.newest.flats[0], engine.replicas[0].weights.newest.flats[0]) for r in engine.replicas
    )


def test_a_value_without_a_gradient_broke_the_backward() -> None:
    """0.1.0: heads were looked up for every value that leaves, but an integer's reader sends nothing back."""
    graph_names = [layer.name for layer in make_setup(SkipNet(), ([], [1])).graph.layers]
    start = graph_names.index("relu")  # `bins`, an integer, crosses
    engine = make_engine(make_setup(SkipNet(), ([start], [1, 1]), weights="one", depth=1))
    engine.train(0, 2)
    assert engine.replicas[0].weights.newest.number == 2


def test_a_minibatch_smaller_than_its_microbatches() -> None:
    """0.1.0: 2 samples in 4 microbatches leave two of them empty, which no cost was known for."""
    setup = make_setup(SkipNet(), ([5], [1, 1]), weights="one", microbatches=4, dataset=Blobs(num_train=46))
    engine = make_engine(setup)
    engine.train(0, 12)
    assert engine.clock_s > 0


@pytest.mark.parametrize("plan", [([], [3]), ([5], [2, 1])], ids=str)
def test_a_whole_run_shorter_than_a_round(plan: tuple[list[int], list[int]]) -> None:
    """A single minibatch on replicated stages: every replica updates, also those that had nothing to do."""
    engine = make_engine(make_setup(SkipNet(), plan))
    engine.train(0, 1)
    assert {replica.weights.newest.number for replica in engine.replicas} == {1}


TIED_RECIPE = """\
name: tied
model: {target: "tests.models:TiedImages"}
dataset: {name: mnist5k}
train: {minibatch_size: 32, optimizer: {lr: 0.1}, max_epochs: 1}
cluster: {name: cluster-a}
parallelism: {mode: pipedream}
engine: {kind: simulated}
"""


@pytest.mark.parametrize(("plan", "num_stages"), [("1-1", 2), ("1-2-1", 3), ("3-1", 2), ("straight", 4)])
def test_a_fixed_plan_of_a_tied_model_is_cut_where_the_planner_cuts_it(
    plan: str, num_stages: int, tmp_path: Path
) -> None:
    """0.1.0: positions in the list of places to cut were taken for layers; places inside a tie are left out of it."""
    (tmp_path / "tied.yaml").write_text(TIED_RECIPE)
    recipe = load(str(tmp_path / "tied.yaml"), [f"parallelism.plan={plan}"]).recipe
    given = prepare(recipe, load_cluster("cluster-a", 1))
    stages = given.setup.plan.stages
    assert len(stages) == num_stages
    planner = Planner(plan_request(recipe, given.cluster, given.profile, given.setup.dataset), "pipedream")
    expected = planner.for_replicas(given.setup.plan.replicas).plan.stages
    assert [stage.start for stage in stages] == [stage.start for stage in expected]


@pytest.mark.parametrize("mode", ["gpipe", "model", "pipedream", "interleaved", "pipemare"])
@pytest.mark.parametrize("kind", ["simulated", "virtual"])
def test_a_tie_is_named_where_it_leaves_too_few_places_to_cut(mode: str, kind: str, tmp_path: Path) -> None:
    """0.1.0: only plans with cuts said why; `straight` said how many stages the model could have, and no more."""
    (tmp_path / "tied.yaml").write_text(TIED_RECIPE)
    words = [f"parallelism.mode={mode}", f"engine.kind={kind}", "cluster.servers=2"]
    words.append("parallelism.plan=" + ("1-1-1-1" if mode == "interleaved" else "straight"))
    answer = CliRunner().invoke(cli, ["draw", str(tmp_path / "tied.yaml"), *words])
    if mode in ("gpipe", "model", "interleaved"):  # which may part a tie since
        assert answer.exit_code == 0, answer.stderr
        return
    assert answer.exit_code == 2
    assert (
        "8 stages were asked for, but the model can be cut in 6 at most; parameter one.weight is tied: layers one,"
        in (answer.stderr)
    )
    assert "two share it and must stay in one stage" in answer.stderr


def test_a_profile_without_any_time_was_taken_and_could_not_be_drawn() -> None:
    """0.1.0: only each time's range was checked; `draw` then looked for the smallest time above 0, and found none."""
    profile = unit_profile(trace(SkipNet()), Blobs(), [4])
    rows = tuple(replace(row, forward_s=0.0, backward_s=0.0) for row in profile.layers[4])
    with pytest.raises(ProfileError, match=r"^layers at 4 samples: every forward_s and backward_s is 0, allowed is"):
        read_profile(write_profile(replace(profile, layers={4: rows})))


def test_an_unknown_store_scheme_was_reported_as_the_key_looked_up() -> None:
    """0.1.0: the deepest cause was reported; for a scheme that MLflow doesn't know, that is a dictionary's KeyError."""
    error = ValueError("got unsupported URI 'foo://bar'")
    error.__cause__ = KeyError("foo")
    assert reason_of(error) == "got unsupported URI 'foo://bar'"


SETTINGS = ("engine.threads=2", "engine.tf32=true", "engine.deterministic=false")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "quickstart/dp", "quickstart/model", "engine.kind=simulated"),
        ("draw", "quickstart/model"),
        ("plan", "quickstart/model", "--no-others"),
        ("profile", "quickstart/model"),
    ],
    ids=lambda words: words[0],
)
def test_profiles_were_measured_without_the_recipe_s_settings(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0: a comparison (and `draw`) measured before threads, TF32 and determinism were set as the recipe says.

    The profile was cached under the recipe's key, so the recipe's run used it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = set()

    def measured(passes: Any) -> Profile:
        found.add((torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))
        return analytic_profile(passes.request, DEVICES["V100"])

    monkeypatch.setattr(measure, "_measured", measured)
    result = CliRunner().invoke(cli, [*words, "cluster.name=local", "model.width=0.05", *SETTINGS])
    assert result.exit_code == 0, result.output
    assert found == {(2, "high", True)}


class LossOnAGpu:
    """Summed loss of a unit, which costs a wait to read."""

    is_cuda = True
    times_read = 0

    def __float__(self) -> float:
        LossOnAGpu.times_read += 1
        return 6.0


@pytest.mark.parametrize("replica", range(3))
def test_odd_replicas_of_the_last_stage_never_read_a_loss(replica: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0: on a GPU the loss of every unit that 50 divides was read: of two replicas one has only odd units."""
    monkeypatch.setattr(LossOnAGpu, "times_read", 0)
    engine: Any = DistributedEngine.__new__(DistributedEngine)
    loss = UnitLoss(cast("torch.Tensor", LossOnAGpu()), 3, 2.0)
    engine.workers = [SimpleNamespace(execute=lambda *given: loss)]
    engine._transport, engine.collectives = SimpleNamespace(latest_loss=math.nan), SimpleNamespace()
    engine._pace = SimpleNamespace(step=lambda: None)
    engine._on_loss = lambda *_: None
    engine._origin_s, engine._num_losses = 0.0, 0
    for unit in range(replica, 3 * 120, 3):
        engine._executed(Instruction(Op.FORWARD, 1, unit))
        assert engine._transport.latest_loss == 3.0
    assert LossOnAGpu.times_read == 3  # of 120


def test_a_fault_held_control_characters_of_terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0: OmegaConf's message about an interpolation names keys as they are, and went to the terminal like that."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(VALID)
    for key in ("\ud7fc", "\x1b[2J", "a\u2028b"):
        answer = CliRunner().invoke(cli, ["show", "r.yaml", f"model.name={{{json.dumps(key)}: {{'': '${{.seed}}'}}}}"])
        assert answer.exit_code == 2
        message, end = answer.stderr[:-1], answer.stderr[-1]
        # How OmegaConf goes on depends on its version.
        assert message.startswith(
            "pipebench: error: command line: model.name: a mapping can't be resolved: Interpolation"
        )
        assert message.isprintable()
        assert end == "\n"
    assert str(Fault("r.yaml", "name", "got a\nb")) == "r.yaml: name: got a\\nb"


def test_an_element_of_a_sweep_that_the_environment_lacks_crashed_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0: elements were resolved for the output before a check that they can be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PB_LACKING", raising=False)
    Path("r.yaml").write_text(VALID)
    answer = CliRunner().invoke(cli, ["show", "r.yaml", "model.width=['${oc.env:PB_LACKING}']"])
    assert answer.exit_code == 2, answer.output
    assert "model.width: got a list, one value is needed here" in answer.stderr


def test_memory_of_a_worker_with_only_idle_layers_could_not_be_predicted(tmp_path: Path) -> None:
    """0.1.0: such a worker allocates nothing, so its memory curve was empty, and the curve's last point was read."""
    given = searching_job(tmp_path, [{"minibatch": 0, "cells": ["groups.1.*"]}])
    empty = given.setup.plan.stages[1]
    assert all(layer.idle for layer in given.setup.graph.layers[empty.start : empty.stop])
    memory = MemoryForecast(given).memory
    assert [peak.worker for peak in memory.peaks] == [0, 1, 2, 3]
    assert memory.peaks[1].num_bytes == 0


def test_copies_that_begin_with_a_move_were_not_charged() -> None:
    """0.1.0: whether devices copy was decided by the first cuts, and again after a drain in simulated runs only."""
    first, after = [KEEP] * 7, (SWAP, KEEP, KEEP, KEEP, RECOMPUTE, SWAP, RECOMPUTE)
    setup = moving_setup([1, 3, 4], first, rate=30.0)
    trained, simulated = make_engine(setup), SimulatedEngine(setup)
    for engine in (trained, simulated):
        moves_of(engine).announce(Repartition(12, (2, 3, 6), after))
        for begin in (0, 20):
            engine.train(begin, 20)
    assert simulated.clock_s == pytest.approx(trained.clock_s, rel=1e-9)


def test_a_model_too_large_to_validate_ended_in_torch_s_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0: validation builds small models only; later, torch's error was reported as an internal one."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(VALID)
    answer = CliRunner().invoke(cli, ["draw", "r.yaml", f"model.num_classes={9 * 10**18}"])
    assert answer.exit_code == 2, answer.output
    assert "vgg16 can't be built with these options: Storage size calculation overflowed" in answer.stderr


def test_libraries_outside_a_virtual_environment_were_taken_for_the_user_s_code() -> None:
    """0.1.0: only the environment's folders were known: our mistakes in calls of torch were reported as the user's."""
    assert users_code._is_library("/opt/python/lib/python3.11/site-packages/omegaconf/_utils.py")
    assert users_code._is_library("/usr/lib/python3/dist-packages/yaml/__init__.py")
    assert not users_code._is_library("/home/anna/packages/site/model.py")


def test_packages_that_pip_put_into_a_folder_of_the_user_s_were_taken_for_his_code(tmp_path: Path) -> None:
    """0.2.0: a run of a model of transformers, installed by `pip install --target`, parsed all of it, twice."""
    record = tmp_path / "lib-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("lib/__init__.py,sha256=abc,0\nlib/inner/net.py,,\nalone.py,,\nlib-1.0.dist-info/RECORD,,\n")
    for name, is_library in {
        "lib/inner/net.py": True,
        "alone.py": True,
        "mine.py": False,
        "mine/lib.py": False,
    }.items():
        assert users_code._is_library(str(tmp_path / name)) is is_library, name
