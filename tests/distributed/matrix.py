"""Every mode of every small model of the zoo, in 2 and 3 processes, against the virtual engine: `nox -s matrix`.

pytest collects this file only when it is named. `test_zoo.py` is the part of it that every change passes.
"""

import pytest

from tests.distributed.test_zoo import check
from tests.distributed.zoo_cases import ZooCase, all_cases
from tests.processes import Processes


@pytest.mark.parametrize("case", all_cases(2), ids=str)
def test_two_processes(two: Processes, case: ZooCase) -> None:
    check(two, [case])


@pytest.mark.parametrize("case", all_cases(3), ids=str)
def test_three_processes(three: Processes, case: ZooCase) -> None:
    check(three, [case])


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_long_run_and_its_drains(request: pytest.FixtureRequest, num_workers: int) -> None:
    """Three epochs' worth of drains: what differs by a bit once differs more and more."""
    processes: Processes = request.getfixturevalue({2: "two", 3: "three"}[num_workers])
    modes = ["pipedream", "gpipe"] + (["pipedream, replicated"] if num_workers == 3 else [])
    check(
        processes, [ZooCase(model, mode, num_workers, (24, 6, 12)) for model in ("gnmt8", "awd_lm") for mode in modes]
    )
