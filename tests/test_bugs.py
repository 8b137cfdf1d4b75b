"""One test per bug that got as far as a commit or a review; the comment names the mechanism."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pipebench.cli import cli
from pipebench.errors import Fault
from pipebench.schedule.drawing import draw_cells
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.timeline import ALL_REDUCE
from tests.models import SkipNet
from tests.recipe.conftest import VALID
from tests.support import Blobs, make_engine, make_setup


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


def test_a_fault_held_what_a_terminal_obeys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0: OmegaConf's message about an interpolation names keys as they are, and went to the terminal like that."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(VALID)
    for key, shown in (("\ud7fc", "\\ud7fc"), ("\x1b[2J", "\\x1b[2J"), ("a\u2028b", "a\\u2028b")):
        answer = CliRunner().invoke(cli, ["show", "r.yaml", f"model.name={{{json.dumps(key)}: {{'': '${{.seed}}'}}}}"])
        assert answer.exit_code == 2
        assert answer.stderr == (
            "pipebench: error: command line: model.name: a mapping can't be resolved: "
            f"Interpolation key '.seed' not found (resolved to 'model.name.{shown}.seed')\n"
        )
    assert str(Fault("r.yaml", "name", "got a\nb")) == "r.yaml: name: got a\\nb"
