"""Processes end with the weights of the virtual engine, by the same losses and bytes (DESIGN section 2)."""

from collections import Counter

import pytest
import torch

from tests.distributed.cases import Case, Outcome, virtually
from tests.processes import Processes

TWO = {
    "single-stage dp": Case("conv", (), (2,), {"weights": "one", "depth": 1}),
    "dp, accumulated": Case("skip", (), (2,), {"weights": "one", "depth": 1, "accumulate": 2}),
    "model": Case("conv", (4,), (1, 1), {"weights": "one", "depth": 1}),
    "gpipe": Case("skip", (4,), (1, 1), {"weights": "one", "order": "all-forwards", "microbatches": 3}),
    "gpipe, recompute": Case(
        "conv", (4,), (1, 1), {"weights": "one", "order": "all-forwards", "microbatches": 4, "recompute": True}
    ),
    "pipedream-flush": Case("skip", (4,), (1, 1), {"weights": "one", "microbatches": 3}),
    "pipedream": Case("conv", (4,), (1, 1)),
    "pipedream, depth 4": Case("skip", (4,), (1, 1), {"depth": 4}),
    "vertical sync": Case("skip", (4,), (1, 1), {"weights": "stash-vertical-sync", "depth": 3}),
    "naive": Case("mlp", (4,), (1, 1), {"weights": "none"}),
    "clipped": Case("skip", (4,), (1, 1), {"weights": "one", "microbatches": 2, "clip_norm": 0.3}),
    "clipped dp": Case("skip", (), (2,), {"weights": "one", "depth": 1, "clip_norm": 0.3}),
}
THREE = {
    "three stages": Case("skip", (3, 6), (1, 1, 1)),
    "three stages, flush": Case("conv", (3, 6), (1, 1, 1), {"weights": "one", "microbatches": 4}),
    "2-1": Case("conv", (4,), (2, 1)),
    "1-2": Case("skip", (4,), (1, 2)),
    "2-1, gpipe": Case("skip", (4,), (2, 1), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
    "clipped": Case("skip", (3, 6), (1, 1, 1), {"weights": "one", "microbatches": 2, "clip_norm": 0.3}),
}
THREE_REPLICAS = {"dp": Case("conv", (), (3,), {"weights": "one", "depth": 1})}


def check(case: Case, found: list[Outcome], tolerance: float) -> None:
    """Compare the processes with the virtual engine; a tolerance of 0 asks for the same bits."""
    expected = virtually(case)
    tensors = [tensors for outcome in found for tensors in outcome.tensors]
    for mine, theirs in zip(tensors, expected.tensors, strict=True):
        assert set(mine) == set(theirs)
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)
    assert Counter(expected.num_bytes) == sum((Counter(outcome.num_bytes) for outcome in found), Counter())
    assert expected.versions == [version for outcome in found for version in outcome.versions]
    losses = sorted(loss for outcome in found for loss, _ in outcome.losses)
    assert losses == pytest.approx(sorted(loss for loss, _ in expected.losses), rel=max(tolerance, 1e-12))
    for outcome in found:  # every process knows the scores
        for known, scores in zip(outcome.scores, expected.scores, strict=True):
            assert known == pytest.approx(scores, rel=max(tolerance, 1e-12))


@pytest.mark.parametrize("name", TWO)
def test_two_processes_end_with_the_virtual_engine_s_weights(two: Processes, name: str) -> None:
    check(TWO[name], two.run("tests.distributed.cases:distributed", TWO[name]), 0.0)


@pytest.mark.parametrize("name", THREE)
def test_three_processes_end_with_the_virtual_engine_s_weights(three: Processes, name: str) -> None:
    check(THREE[name], three.run("tests.distributed.cases:distributed", THREE[name]), 0.0)


@pytest.mark.parametrize("name", THREE_REPLICAS)
def test_three_replicas_agree_to_float_tolerance(three: Processes, name: str) -> None:
    """A ring adds three summands in another order."""
    check(THREE_REPLICAS[name], three.run("tests.distributed.cases:distributed", THREE_REPLICAS[name]), 1e-5)
