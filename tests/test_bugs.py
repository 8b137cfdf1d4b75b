"""One test per bug that got as far as a commit or a review; the comment names the mechanism."""

from dataclasses import replace

import pytest
import torch

from pipebench.errors import ProfileError
from pipebench.graph import trace
from pipebench.profile.model import Profile
from pipebench.schedule.drawing import draw_cells
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.timeline import ALL_REDUCE
from pipebench.tracking.run_log import _one_line
from tests.models import SkipNet
from tests.support import Blobs, make_engine, make_setup, unit_profile


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


def test_a_profile_without_any_time_was_taken_and_could_not_be_drawn() -> None:
    """0.1.0: only each time's range was checked; `draw` then looked for the smallest time above 0, and found none."""
    profile = unit_profile(trace(SkipNet()), Blobs(), [4])
    rows = tuple(replace(row, forward_s=0.0, backward_s=0.0) for row in profile.layers[4])
    with pytest.raises(ProfileError, match=r"^layers at 4 samples: every forward_s and backward_s is 0, allowed is"):
        Profile.from_json(replace(profile, layers={4: rows}).to_json())


def test_a_store_that_does_not_exist_was_told_by_the_key_that_was_looked_up() -> None:
    """0.1.0: the deepest cause was told; of a scheme that MLflow doesn't know that is the KeyError of a dictionary."""
    error = ValueError("got unsupported URI 'foo://bar'")
    error.__cause__ = KeyError("foo")
    assert _one_line(error) == "got unsupported URI 'foo://bar'"
