"""The largest update that fits in memory: against every number of minibatches tried one by one."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.errors import PlanError
from pipebench.planner.predict import PlannedWorkload
from pipebench.recipe.load import load
from pipebench.simulate.memory import stage_memories
from pipebench.train.job import Job
from pipebench.train.largest import most_within, with_largest_update
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch

RECIPE = """\
name: small
model: {{name: gnmt8, hidden_size: 8, source_vocabulary: 128, target_vocabulary: 128}}
dataset: {{name: number_words}}
train: {{minibatch_size: 32, optimizer: {{name: adam, lr: 1}}, max_epochs: 1}}
cluster: {{name: small.yaml}}
parallelism: {{mode: gpipe, plan: {plan}, recompute: {recompute}}}
engine: {{kind: simulated}}
"""
CLUSTER = """\
device: {{value: V100, assumed: a test}}
memory: {{value: {memory}, assumed: a test}}
levels:
  - name: server
    count: {{value: 4, assumed: a test}}
    bandwidth: {{value: 10 GB/s, assumed: a test}}
    latency: {{value: 10 us, assumed: a test}}
    efficiency: {{value: 1, assumed: a test}}
"""


def job_of(folder: Path, accumulate: object, *, plan: str, recompute: str, memory: str) -> Job:
    (folder / "small.yaml").write_text(CLUSTER.format(memory=memory))
    (folder / "recipe.yaml").write_text(RECIPE.format(plan=plan, recompute=recompute))
    loaded = load(str(folder / "recipe.yaml"), [f"parallelism.accumulate={accumulate}"])
    return prepare(loaded.recipe, loaded.cluster)


def peak_bytes(job: Job) -> float:
    result, _ = simulate_epoch(job, MemoryForecast(job))
    return result.metrics["peak_memory_bytes_max"]


@pytest.mark.parametrize(("plan", "recompute", "memory"), [("straight", "true", "880 kB"), ("2-1-1", "false", "6 MB")])
def test_largest_is_the_last_number_whose_run_fits(tmp_path: Path, plan: str, recompute: str, memory: str) -> None:
    def tried(accumulate: object) -> Job:
        return job_of(tmp_path, accumulate, plan=plan, recompute=recompute, memory=memory)

    found = tried("largest")
    limit = found.cluster.memory_bytes
    assert limit is not None
    fitting = list(itertools.takewhile(lambda m: peak_bytes(tried(m)) <= limit, itertools.count(1)))
    assert found.setup.pipeline.accumulate == len(fitting) > 2
    assert peak_bytes(found) <= limit < peak_bytes(tried(len(fitting) + 1))


def test_result_says_how_many_it_is(tmp_path: Path) -> None:
    job = job_of(tmp_path, "largest", plan="straight", recompute="false", memory="2 MB")
    result, _ = simulate_epoch(job)
    number = job.setup.pipeline.accumulate
    assert result.notes == {"memory": f"{number} minibatches per update, the most that fit in 2.00 MB"}
    assert result.metrics["samples_per_update"] == 32 * number


def test_frozen_parameters_need_less_memory(tmp_path: Path) -> None:
    setup = job_of(tmp_path, 1, plan="straight", recompute="false", memory="5 MB").setup
    given = PlannedWorkload(setup.pipeline, setup.costs, setup.cluster, setup.plan.devices, setup.sampler)
    memories = stage_memories(setup.profile, setup.plan, setup.pipeline)
    beside = tuple(replace(each, untrained=10**6) for each in memories)
    smaller = replace(given, cluster=replace(given.cluster, memory_bytes=4 * 10**6))
    found = with_largest_update(given, beside)
    assert found == with_largest_update(smaller, memories) != with_largest_update(given, memories)


def test_more_than_an_epoch_is_no_update(tmp_path: Path) -> None:
    job = job_of(tmp_path, "largest", plan="straight", recompute="false", memory="16 GB")
    number = job.setup.pipeline.accumulate
    assert number == job.setup.sampler.minibatches_per_epoch
    result, _ = simulate_epoch(job)
    assert result.notes["memory"] == f"{number} minibatches per update, an epoch's, which all fit in 16.0 GB"


def test_not_even_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^parallelism.accumulate: not even one minibatch per update fits: it needs"):
        job_of(tmp_path, "largest", plan="straight", recompute="false", memory="100 kB")


@pytest.mark.parametrize("limit", [0, 1, 2, 49, 50, 999, 1000, 10**9])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_most_within_is_exact_whatever_the_values(limit: int, power: int) -> None:
    values = {n: n // 7 + n**power for n in range(1, 300)}
    assert most_within(limit, values.__getitem__, 299) == sum(value <= limit for value in values.values())


def test_most_within_tries_few_numbers_if_values_are_linear() -> None:
    asked: list[int] = []

    def value(number: int) -> int:
        asked.append(number)
        return 1000 + 7 * number

    assert most_within(1000 + 7 * 450 + 3, value, 80_000) == 450
    assert len(asked) <= 7
    assert sum(asked) < 4 * 450
