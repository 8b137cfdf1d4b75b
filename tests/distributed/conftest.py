"""The processes that the tests of the distributed engine share: one spawn per number of workers."""

from collections.abc import Iterator

import pytest

from tests.processes import Processes


@pytest.fixture(scope="package")
def two() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="package")
def three() -> Iterator[Processes]:
    with Processes(3) as processes:
        yield processes


@pytest.fixture(scope="package")
def four() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes
