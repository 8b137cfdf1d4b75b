"""The zoo's models in processes end with the virtual engine's weights; the full matrix is in `matrix.py`."""

from collections.abc import Sequence

import pytest

from tests.distributed import zoo_cases
from tests.distributed.cases import compare
from tests.distributed.zoo_cases import MODELS, MODES, ZooCase
from tests.processes import Processes

# Every model, and every mode, with 2 and with 3 processes.
TWO = [
    ZooCase("vgg16", "dp", 2),
    ZooCase("vgg16", "model", 2),
    ZooCase("resnet50", "gpipe", 2),
    ZooCase("gnmt8", "pipedream", 2),
    ZooCase("gnmt8", "dp", 2),
    ZooCase("transformer", "pipedream", 2),
    ZooCase("bert", "gpipe", 2),
    ZooCase("awd_lm", "pipedream-flush", 2),
]
THREE = [
    ZooCase("vgg16", "pipedream, replicated", 3),
    ZooCase("resnet50", "pipedream", 3),
    ZooCase("resnet50", "pipedream-flush", 3),
    ZooCase("gnmt8", "gpipe", 3),
    ZooCase("gnmt8", "dp", 3),
    ZooCase("transformer", "pipedream", 3),
    ZooCase("bert", "pipedream, replicated", 3),
    ZooCase("awd_lm", "model", 3),
    ZooCase("awd_lm", "pipedream, replicated", 3),
]


def check(processes: Processes, cases: Sequence[ZooCase]) -> None:
    """Compare with the virtual engine: the same bits, unless a ring adds more than two summands."""
    found = processes.run("tests.distributed.zoo_cases:all_distributed", cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        tolerance = 0.0 if max(case.replicas) <= 2 else 1e-4
        try:
            compare(outcomes, zoo_cases.virtually(case), tolerance)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_the_part_has_every_model_and_mode() -> None:
    for cases, num_workers in ((TWO, 2), (THREE, 3)):
        assert {case.model for case in cases} == set(MODELS)
        assert {case.mode for case in cases} == {mode for mode, (_, plans) in MODES.items() if num_workers in plans}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_processes(two: Processes, case: ZooCase) -> None:
    check(two, [case])


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE, ids=str)
def test_three_processes(three: Processes, case: ZooCase) -> None:
    check(three, [case])
