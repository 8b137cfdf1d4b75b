"""A small pipeline that tests of control threads share."""

from pipebench.schedule.pipeline import Pipeline, chain


def straight(num_stages: int = 2) -> Pipeline:
    return Pipeline((1,) * num_stages, chain(num_stages), "1f1b", False, num_stages)
