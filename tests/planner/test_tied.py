"""Plans of models with tied weights: which modes may have copies of one, and what the copies cost."""

import itertools
import math
from dataclasses import replace

import pytest

from pipebench.errors import PlanError
from pipebench.planner.planner import Planner
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.schedule.modes import MODES
from pipebench.simulate.steady import simulate_all
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from pipebench.train.request import plan_request

WORDS = 2000 * 64 * 4  # bytes of the small GPT-2's matrix


def job_of(*overrides: str, slower: float = 1.0) -> Job:
    """Return the job of the small tied GPT-2, on links so many times slower."""
    loaded, cluster = load("small/gpt2/gpipe-tied", ["engine.kind=simulated", *overrides]), load_cluster("cluster-a", 1)
    levels = [replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s / slower) for each in cluster.levels]
    return prepare(loaded.recipe, replace(cluster, levels=tuple(levels)), trains=False)


def test_the_planner_cuts_inside_a_tie_and_charges_both_copies() -> None:
    job = job_of("parallelism.plan=auto")
    setup = job.setup
    assert setup.pipeline.ties == ((0, len(setup.plan.stages) - 1),)
    (tied,) = setup.costs.ties
    assert (tied.parameters, tied.num_bytes) == (("words.weight",), WORDS)
    first, *_, last = setup.costs.stages
    assert first.tied_bytes == last.tied_bytes == WORDS
    profile = setup.profile
    for costs in (first, last):
        assert costs.update_s == profile.update_floor_s + costs.parameter_bytes * profile.update_s_per_byte
    planner = Planner(plan_request(job.recipe, job.cluster, profile, setup.dataset), "gpipe")
    found = planner.estimate_of(setup.plan)
    units = job.recipe.parallelism.microbatches
    assert found.num_bytes["all-reduce"] == 2 * WORDS
    held = 2 + profile.state_bytes_per_byte  # a version, a gradient, and Adam's averages
    states = planner.work.states
    whole = planner.memory(math.inf).beside_activations(states, 0, len(states) - 1)[0]
    apart = sum(
        planner.memory(math.inf).beside_activations(states, *bounds)[0] - crossing
        for *bounds, crossing in _stages(planner, [stage.start for stage in setup.plan.stages[1:]])
    )
    assert units > 1
    assert apart - whole == pytest.approx(held * WORDS)


def test_stages_of_one_worker_have_one_copy() -> None:
    """Of a V of two stages per worker, the first has both the first stage and the last."""
    job = job_of("parallelism.mode=zbv", "parallelism.plan=straight", "parallelism.recompute=false")
    setup = job.setup
    assert setup.pipeline.ties == ((0, 2 * setup.pipeline.num_workers - 1),)
    found = Planner(plan_request(job.recipe, job.cluster, setup.profile, setup.dataset), "zbv").estimate_of(setup.plan)
    assert found.num_bytes["all-reduce"] == sum(
        num_bytes for (kind, _), num_bytes in simulate_all(setup, 1).num_bytes.items() if kind == "all-reduce"
    )


def _stages(planner: Planner, starts: list[int]) -> list[tuple[int, int, float]]:
    """Return the states around every stage, and its buffers for two transfers in each direction."""
    states = planner.work.states
    place = {members.bit_count(): state for state, members in enumerate(states.members)}
    bounds = [0, *(place[start] for start in starts), len(states) - 1]
    sent = [0.0, *(float(states.sent_bytes[bound]) for bound in bounds[1:-1]), 0.0]
    return [(a, b, 2 * (sent[i] + sent[i + 1])) for i, (a, b) in enumerate(itertools.pairwise(bounds))]


def test_plans_that_cut_inside_a_tie_are_compared_with_those_that_do_not() -> None:
    """On links so slow that a sum over copies takes longer than anything, both ends stay in one stage."""
    fast = job_of("parallelism.plan=auto")
    slow = job_of("parallelism.plan=auto", slower=1e5)
    assert fast.setup.pipeline.ties
    assert not slow.setup.pipeline.ties


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [name for name, row in MODES.items() if row.shape not in ("one", "one-stage")])
def test_modes_without_common_updates_do_not_cut_inside_a_tie(mode: str) -> None:
    overrides = [f"parallelism.mode={mode}", "parallelism.microbatches=1", "train.streams=4"]
    plan = "1-1-1-1" if MODES[mode].chunks == 1 else "1-1"
    overrides += [f'parallelism.plan="{"2-2" if MODES[mode].shape == "even" else plan}"']
    if mode == "interleaved":
        overrides += ["parallelism.microbatches=2"]
    if MODES[mode].ties:
        assert job_of(*overrides).setup.pipeline.ties
        return
    with pytest.raises(PlanError, match=r"words.weight is tied: .* must stay in one stage, except under modes whose"):
        job_of(*overrides)


def test_a_refusal_says_that_sharded_copies_can_not_be_separated_either() -> None:
    overrides = ["parallelism.mode=pipedream-flush", "parallelism.plan=2-2", "parallelism.shard=optimizer"]
    with pytest.raises(
        PlanError, match=r"\(those with a flush, .*\), where no layers move and parallelism.shard isn't optimizer$"
    ):
        job_of("train.streams=4", *overrides)


def test_without_a_flush_fp16_refuses_a_tie() -> None:
    with pytest.raises(PlanError, match=r"stages 0 and 3 share a weight, and without a flush train.precision fp16"):
        job_of(
            "parallelism.mode=pipedream-2bw", "parallelism.microbatches=1", "train.precision=fp16",
            "parallelism.accumulate=4",
        )  # fmt: skip
