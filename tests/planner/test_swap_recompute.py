"""Algorithm 2 and the search for the best policies against brute force, and a stage's bytes tensor by tensor."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipebench.model.plan import StagePlan
from pipebench.planner.activations import MOST_ON_DEVICE
from pipebench.planner.stage_problem import StageOutcome, StageProblem
from pipebench.planner.swap_recompute import algorithm_2, best_policies
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.simulate.memory import kept_bytes, swapped_bytes
from tests.planner.problems import chain

POLICIES = (KEEP, RECOMPUTE, SWAP)
SEEDS = range(20)


def rows(seed: int, num_layers: int) -> tuple[LayerProfile, ...]:
    """Return layers with skips, some of which save the same tensors as others, and a loss."""
    draw = random.Random(seed)
    made: list[LayerProfile] = []
    for index in range(num_layers):
        reads = tuple(sorted({max(0, index - 1 - int(draw.expovariate(0.7))) for _ in range(2)})) if index else ()
        shared = tuple((read, min(9, made[read].output_bytes)) for read in reads if draw.random() < 0.5)
        made.append(
            LayerProfile(
                f"layer{index}", "Linear", draw.randrange(1, 10) * 1.0, draw.randrange(1, 20) * 1.0, draw.randrange(20),
                4, reads, ("x",) if draw.random() < 0.3 else (), saved_bytes=draw.choice([0, 9, draw.randrange(30)]),
                saved_with=shared,
            )
        )  # fmt: skip
    return (*made, LayerProfile("loss", "loss", 1.0, 2.0, 4, 4, (num_layers - 1,), saved_bytes=3))


def problem(seed: int, num_layers: int) -> StageProblem:
    """Return a stage of some layers of a model, with memory for a part of what it keeps."""
    draw = random.Random(seed)
    before, after = draw.randrange(3), draw.randrange(3)
    made = rows(seed, before + num_layers + after)
    stage = StageProblem(
        made, before, before + num_layers, draw.randrange(1, 8), 0.0, 10.0, draw.randrange(5),
        draw.choice([None, 0.5, 2.0, 10.0]), input_bytes={"x": 7},
    )  # fmt: skip
    free = draw.random()
    least = min(stage.outcome((policy,) * num_layers).num_bytes for policy in POLICIES)
    most = stage.outcome((KEEP,) * num_layers).num_bytes
    return replace(stage, limit_bytes=least + free * (most - least))


def by_tensor(stage: StageProblem, memory: Sequence[str]) -> tuple[float, float]:
    """Return a stage's bytes and extra seconds, summed over its tensors."""
    layers = [*range(stage.start, stage.stop + (stage.stop == len(stage.rows) - 1))]
    policy = dict(zip(layers, (*memory, memory[-1]), strict=False))
    read = read_by_runs(stage, policy)
    unit = sum({**read, **saved(stage, policy, {RECOMPUTE})}.values())
    stays = sum({**read, **saved(stage, policy, {RECOMPUTE, SWAP})}.values())
    again = [layer for layer in layers if policy[layer] == RECOMPUTE]
    num_bytes = stage.constant_bytes + stage.in_flight * (stage.each_bytes + stays)
    num_bytes += on_device(stage, layers, unit - stays) * (unit - stays)
    num_bytes += sum(stage.rows[layer].saved_bytes for layer in again)
    work_s = sum(stage.rows[layer].forward_s + stage.rows[layer].backward_s for layer in layers)
    copies_s = 2 * (unit - stays) / stage.pcie_bytes_per_s if stage.pcie_bytes_per_s else 0.0
    return num_bytes, sum(stage.rows[layer].forward_s for layer in again) + max(0.0, copies_s - work_s)


def on_device(stage: StageProblem, layers: Sequence[int], swapped_bytes: int) -> float:
    """Return how many of the units that swap are on the device at once, at most."""
    if not stage.pcie_bytes_per_s or not swapped_bytes:
        return min(stage.in_flight, MOST_ON_DEVICE)
    copy_s = swapped_bytes / stage.pcie_bytes_per_s
    forward_s = sum(stage.rows[layer].forward_s for layer in layers)
    late = 3 + (stage.in_flight - 1) * max(0.0, 1 - forward_s / copy_s)  # what isn't copied while others run forward
    return min(stage.in_flight, late)


def read_by_runs(stage: StageProblem, policy: dict[int, str]) -> dict[str, int]:
    """Return the bytes that every run of recomputed layers reads, by run and what it is."""
    read: dict[str, int] = {}
    for layer in (layer for layer in policy if policy[layer] == RECOMPUTE):
        first = layer
        while policy.get(first - 1) == RECOMPUTE:
            first -= 1
        row = stage.rows[layer]
        read |= {f"run {first} reads {each}": stage.rows[each].output_bytes for each in row.reads if each < first}
        read |= {f"run {first} reads {name}": stage.input_bytes[name] for name in row.inputs}
    return read


def saved(stage: StageProblem, policy: dict[int, str], out: set[str]) -> dict[str, int]:
    """Return the bytes of every tensor that layers save, but for those with some policies."""
    found = {}
    for layer in (layer for layer in policy if policy[layer] not in out):
        found[f"own {layer}"] = stage.rows[layer].saved_bytes
        for position, (holder, size) in enumerate(stage.rows[layer].saved_with):
            if not any(policy.get(each, next(iter(out))) not in out for each in savers(stage.rows, holder, size)):
                found[f"shared {layer} {position}"] = size
    return found


def savers(made: Sequence[LayerProfile], holder: int, size: int) -> list[int]:
    """Return the layers that save a tensor of an earlier layer, back to the first that does."""
    found = [holder]
    while made[found[-1]].saved_bytes < size:
        earlier = [before for before, n in made[found[-1]].saved_with if n >= size]
        if not earlier:
            break
        found.append(earlier[0])
    return found


def every(stage: StageProblem) -> list[StageOutcome]:
    return [stage.outcome(memory) for memory in itertools.product(stage.choices, repeat=stage.num_layers)]


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_a_stage_equal_those_of_its_tensors(seed: int) -> None:
    stage = problem(seed, 6)
    draw = random.Random(seed)
    for _ in range(30):
        memory = [draw.choice(POLICIES if stage.pcie_bytes_per_s else POLICIES[:2]) for _ in range(6)]
        found = stage.outcome(memory)
        assert (found.num_bytes, found.extra_s) == pytest.approx(by_tensor(stage, memory))


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_a_stage_equal_the_simulator_s(seed: int) -> None:
    stage = problem(seed, 9)
    draw = random.Random(seed)
    for _ in range(10):
        memory = tuple(draw.choice(POLICIES) for _ in range(9))
        plan = StagePlan(stage.start, stage.stop, 1, (0,), memory)
        sums = stage.outcome(memory).sums
        assert sums.unit_bytes == kept_bytes(stage.rows, plan, stage.input_bytes)
        assert sums.swapped_bytes == swapped_bytes(stage.rows, plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_policies_equal_brute_force_s(seed: int) -> None:
    stage = problem(seed, 7)
    fitting = [each for each in every(stage) if each.fits]
    found = best_policies(stage)
    assert found.is_exact or not fitting
    assert found.fits == bool(fitting)
    if fitting:
        assert found.extra_s == pytest.approx(min(each.extra_s for each in fitting))
    by_paper = algorithm_2(stage)
    if by_paper.fits:
        assert by_paper.extra_s >= found.extra_s - 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_a_search_that_is_cut_short_says_so_and_is_no_worse_than_the_paper(seed: int) -> None:
    stage = problem(seed, 40)
    found, by_paper = best_policies(stage, most_labels=1), algorithm_2(stage)
    assert found.fits >= by_paper.fits
    if by_paper.fits:
        assert found.extra_s <= by_paper.extra_s + 1e-9
    better = best_policies(stage)
    assert not found.fits or better.extra_s <= found.extra_s + 1e-9


def simple(saved: Sequence[int], forward: Sequence[float], limit_bytes: float, pcie_bytes_per_s: float) -> StageProblem:
    """Return a first stage of four that could be p = 5 deep; layers put out nothing, so that runs keep nothing."""
    made = [
        replace(row, saved_bytes=n, forward_s=s, backward_s=2 * s, output_bytes=0)
        for row, n, s in zip(chain(len(saved), 0), saved, forward, strict=False)
    ]
    after = replace(made[-1], name="after", reads=(len(made) - 1,))
    loss = chain(1, 0)[-1]
    return StageProblem((*made, after, loss), 0, len(made), 4, limit_bytes, pcie_bytes_per_s=pcie_bytes_per_s)


def least_again_s(saved: Sequence[int], forward: Sequence[int], needed: int) -> int:
    """Return the fewest seconds of layers that save so much together: a knapsack, by what can be saved in each."""
    most = [0]
    for num_bytes, seconds in zip(saved, forward, strict=True):
        longer = [*most, *[most[-1]] * seconds]
        most = [max(own, longer[i - seconds] + num_bytes if i >= seconds else 0) for i, own in enumerate(longer)]
    return next(seconds for seconds, num_bytes in enumerate(most) if num_bytes >= needed)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_of_hundreds_of_layers_comes_near_the_best_policies(seed: int) -> None:
    """Layers that read nothing of each other, of a pipeline without copies: what is computed again frees 3 of 4."""
    draw = random.Random(seed)
    saved = [draw.randrange(1, 40) for _ in range(200)]
    forward = [draw.randrange(1, 20) for _ in saved]
    share = draw.uniform(0.3, 0.95)  # of what all keep
    stage = simple(saved, [float(each) for each in forward], 4 * sum(saved) * share, 0.0)
    stage = replace(stage, pcie_bytes_per_s=None)
    best_s = least_again_s(saved, forward, math.ceil((4 * sum(saved) - stage.limit_bytes) / 3))
    found = best_policies(stage, most_labels=256)
    assert found.fits
    assert best_s <= found.extra_s <= 1.02 * best_s
    assert not found.is_exact


def test_a_stage_that_fits_keeps_everything_and_algorithm_2_swaps_anyway() -> None:
    stage = simple([10, 10], [1.0, 1.0], limit_bytes=1000.0, pcie_bytes_per_s=20.0)
    assert best_policies(stage).memory == (KEEP, KEEP)
    assert algorithm_2(stage).memory == (SWAP, SWAP)


def test_algorithm_2_swaps_as_far_as_the_window_reaches_and_then_takes_every_layers_op() -> None:
    """Worked by hand: t_fwd + t_bwd = 21 s, so that space is 21 P bytes, of which a layer takes four times its own.

    With P = 2 all copies take longer than forwards: ops are to recompute, gains 10, 2.5 and 4; space is 42, 2, -30.
    With P = 5 the second and third are swapped, gains 10, 5 and 5; space is 105, 65, 25, -7.
    """
    slow = simple([10, 10, 8], [1.0, 4.0, 2.0], limit_bytes=0.0, pcie_bytes_per_s=2.0)
    assert algorithm_2(slow).memory == (SWAP, RECOMPUTE, SWAP)
    assert algorithm_2(replace(slow, limit_bytes=1e9)).memory == (SWAP, KEEP, SWAP)
    assert algorithm_2(replace(slow, pcie_bytes_per_s=5.0)).memory == (SWAP, SWAP, SWAP)


def test_hidden_swaps_cost_nothing_and_others_equation_2_s_time() -> None:
    stage = simple([30, 30], [1.0, 1.0], limit_bytes=0.0, pcie_bytes_per_s=20.0)
    hidden = stage.outcome((SWAP, KEEP))
    assert hidden.extra_s == 0.0
    both = stage.outcome((SWAP, SWAP))
    assert both.extra_s == pytest.approx(2 * 60 / 20 - stage.window_s) == 0.0
    late = replace(stage, pcie_bytes_per_s=10.0).outcome((SWAP, SWAP))
    assert late.extra_s == 6.0


def test_few_units_in_flight_are_not_swapped() -> None:
    """Three are all on the device: the one that leaves, the one that runs and the one that comes."""
    stage = simple([30, 30], [1.0, 1.0], limit_bytes=220.0, pcie_bytes_per_s=1e9)
    assert SWAP in best_policies(stage).memory
    shallow = replace(stage, in_flight=3)
    assert SWAP not in best_policies(shallow).memory
    assert shallow.outcome((SWAP, SWAP)).num_bytes == shallow.outcome((KEEP, KEEP)).num_bytes
