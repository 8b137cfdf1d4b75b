"""The checks of a checkpoint, function by function: a single wrong operator in one of them fails a test."""

import types
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipebench.checkpoint.handover import StateClaim
from pipebench.checkpoint.progress import SavedProgress, _is_of_one_engine
from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import CheckpointError
from pipebench.checkpoint.tensors import _is_dense
from pipebench.schedule.operations import Op

CLAIM = StateClaim(
    frozenset({"norm.count"}), frozenset({"lstm"}), Share({}, replica=1, num_replicas=2, unit_sizes=(4,))
)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        (("counters", "1/norm.count"), True),
        (("counters", "0/norm.count"), False),
        (("counters", "1/other.count"), False),
        (("carried", "3/train/lstm"), True),
        (("carried", "2/train/lstm"), False),
        (("carried", "3/train/other"), False),
        (("loss_scale", "anything"), True),
        (("parameters", "norm.count"), True),
        (("parameters", "other"), False),
    ],
)
def test_a_replica_needs_its_counters_and_the_streams_of_its_layers(key: tuple[str, str], wanted: bool) -> None:
    assert CLAIM.wants(key) is wanted


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(()), True),
        (torch.zeros(2), True),
        (torch.zeros(3, 2).t(), True),
        (torch.zeros(2).as_strided((2,), (0,)), False),
        (torch.zeros(4).as_strided((2, 2), (1, 1)), False),
    ],
)
def test_dense_tensors_have_every_element_once(tensor: torch.Tensor, dense: bool) -> None:
    assert _is_dense(tensor) is dense


def meter(**changed: Any) -> dict[str, Any]:
    seconds = {op.name: 0.0 for op in Op}
    phases = {"training": seconds, "evaluation": seconds, **changed}
    return {"meter": types.SimpleNamespace(**{name: types.SimpleNamespace(seconds=s) for name, s in phases.items()})}


VIRTUAL = {"busy_s": 1.0, "stall_s": 0.0, "again_s": 0.0, "swap_stall_s": 0.0, "evaluation_s": 0.0}


@pytest.mark.parametrize(
    ("facts", "fits"),
    [
        (VIRTUAL, True),
        ({"busy_s": 1.0, "stall_s": 0.0}, False),
        (meter(), True),
        (meter(training={}), False),
        (meter(evaluation={"FORWARD": 0.0}), False),
        ({**meter(), **VIRTUAL}, False),
    ],
)
def test_facts_are_of_one_kind_of_engine(facts: Any, fits: bool) -> None:
    assert _is_of_one_engine(facts) is fits


PROGRESS = SavedProgress(
    taken_by="dp 1", facts=[], samples=8, epoch=1.0, points=[], training_s_at=[], counted_from=(0, 0.0), loss_sum=0.0,
    weight=0.0, training_s=0.0, evaluation_s=0.0, checkpoint_s=0.0, clock_s=0.0, saved_at_s=0.0,
    lost_s=0.0, bytes_before=(), last_samples=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("training_s", "refused"), [(2.0, False), (2.0 + 1e-10, False), (2.0 + 1e-6, True), (1.0, False)]
)
def test_training_time_beyond_the_clock_is_refused(training_s: float, refused: bool) -> None:
    progress = replace(PROGRESS, clock_s=2.0, training_s=training_s)
    refusal = pytest.raises(CheckpointError, match=r"progress.training_s: .* at most clock_s, 2")
    with refusal if refused else nullcontext():
        progress._check()
