"""Rates of torch's schedulers by samples seen, and by samples per update: against loops that step them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipebench.errors import UserCodeError
from pipebench.recipe.named import KINDS, SCHEDULE
from pipebench.recipe.ranges import CHOICES
from pipebench.recipe.schema import OptimizerRecipe, PeriodRecipe, ScheduleRecipe, TrainRecipe
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.train.learning_rate import LR_SCALINGS, learning_rate, lr_scales, own_schedule, steps_before

NUM_TRAIN, SIZE, EPOCHS, LR = 46, 10, 6, 0.3  # minibatches of 10, 10, 10, 10 and 6
NUM_MINIBATCHES = 5
# Every scheduler of torch's that takes plain values, and arguments that make it change within six epochs.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "constant_lr": {"factor": 0.5, "total_iters": 2},
    "cosine_annealing_lr": {"T_max": 4, "eta_min": 0.01},
    "cosine_annealing_warm_restarts": {"T_0": 2, "T_mult": 2},
    "cyclic_lr": {"base_lr": 0.1, "max_lr": 0.7, "step_size_up": 2, "cycle_momentum": False},
    "exponential_lr": {"gamma": 0.7},
    "linear_lr": {"start_factor": 0.25, "total_iters": 4},
    "multi_step_lr": {"milestones": [1, 4], "gamma": 0.3},
    "one_cycle_lr": {"max_lr": 0.9, "total_steps": EPOCHS * NUM_MINIBATCHES, "cycle_momentum": False},
    "polynomial_lr": {"power": 2.0, "total_iters": 5},
    "step_lr": {"step_size": 2, "gamma": 0.1},
}


def train_recipe(
    name: str, arguments: dict[str, Any], step_every: PeriodRecipe | None = None, **optimizer: Any
) -> TrainRecipe:
    keys = {key: value for key, value in arguments.items() if key in ("factor", "power")}
    rest = {key: value for key, value in arguments.items() if key not in keys}
    return TrainRecipe(
        minibatch_size=SIZE,
        max_epochs=EPOCHS,
        optimizer=OptimizerRecipe(lr=LR, **optimizer),
        schedule=ScheduleRecipe(name, step_every=step_every, arguments=rest, **keys),
    )


def pipeline_of(*replicas: int, flushes: bool = False, accumulate: int = 1) -> Pipeline:
    return Pipeline(replicas, chain(len(replicas)), "1f1b", flushes, 2, accumulate=accumulate)


def played(name: str, num_minibatches_per_step: int) -> list[float]:
    """Return the rate of every minibatch in a plain loop."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], LR)
    scheduler = getattr(torch.optim.lr_scheduler, KINDS[SCHEDULE].targets()[name].partition(":")[2])(
        optimizer, **ARGUMENTS[name]
    )
    rates = []
    for k in range(EPOCHS * NUM_MINIBATCHES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (k + 1) % num_minibatches_per_step == 0:
            scheduler.step()
    return rates


def test_every_scheduler_of_torch_is_tested() -> None:
    assert {*ARGUMENTS} >= {*KINDS[SCHEDULE].names()} - {*KINDS[SCHEDULE].ours}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    ("step_every", "minibatches"), [(None, 5), (PeriodRecipe(epochs=2), 10), (PeriodRecipe(minibatches=1), 1)]
)
def test_rates_equal_a_plain_loop_s(name: str, step_every: PeriodRecipe | None, minibatches: int) -> None:
    """Bit by bit, in any order: a run may go on anywhere, and stages are at different samples."""
    rate = learning_rate(train_recipe(name, ARGUMENTS[name], step_every), pipeline_of(1), NUM_TRAIN)
    befores = [epoch * NUM_TRAIN + k * SIZE for epoch in range(EPOCHS) for k in range(NUM_MINIBATCHES)]
    expected = played(name, minibatches)
    assert len({*expected}) > 1
    assert [rate(0, before, SIZE) for before in befores] == expected
    later = learning_rate(train_recipe(name, ARGUMENTS[name], step_every), pipeline_of(1), NUM_TRAIN)
    assert later(0, befores[17], SIZE) == expected[17]
    assert later(0, befores[3], SIZE) == expected[3]


def test_steps_are_counted_in_epochs_or_minibatches_of_any_length() -> None:
    befores = [epoch * NUM_TRAIN + k * SIZE for epoch in range(4) for k in range(NUM_MINIBATCHES)]

    def steps(every: PeriodRecipe) -> list[int]:
        return [steps_before(before, every, SIZE, NUM_TRAIN) for before in befores]

    assert steps(PeriodRecipe(epochs=1)) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert steps(PeriodRecipe(epochs=3)) == [0] * 15 + [1] * 5
    assert steps(PeriodRecipe(minibatches=1)) == list(range(20))
    assert steps(PeriodRecipe(minibatches=3)) == [k // 3 for k in range(20)]


def test_stages_of_other_widths_have_the_scaled_rate_of_their_samples() -> None:
    rate = learning_rate(train_recipe("step_lr", ARGUMENTS["step_lr"]), pipeline_of(3, 1), NUM_TRAIN)
    assert [rate(stage, before, SIZE) for before in (0, 2 * NUM_TRAIN) for stage in (0, 1)] == pytest.approx(
        [LR, LR / 3, LR * 0.1, LR * 0.1 / 3]
    )


def test_warm_up_comes_before_a_scheduler_s_rate() -> None:
    train = train_recipe("exponential_lr", {"gamma": 0.5})
    schedule = ScheduleRecipe("exponential_lr", warmup_epochs=1, arguments={"gamma": 0.5})
    rate = learning_rate(TrainRecipe(**{**vars(train), "schedule": schedule}), pipeline_of(1), NUM_TRAIN)
    assert rate(0, 0, 10) == pytest.approx(LR * 10 / 46)
    assert rate(0, 46, 10) == LR * 0.5


def test_a_scheduler_that_ends_too_early_is_reported() -> None:
    short = {"max_lr": 0.9, "total_steps": 3, "cycle_momentum": False}
    rate = learning_rate(train_recipe("one_cycle_lr", short), pipeline_of(1), NUM_TRAIN)
    rate(0, 3 * NUM_TRAIN, SIZE)
    with pytest.raises(
        UserCodeError, match=r"train.schedule.name: one_cycle_lr fails at step 4: ValueError: Tried to s"
    ):
        rate(0, 4 * NUM_TRAIN, SIZE)
    with pytest.raises(UserCodeError, match=r"train.schedule.name: one_cycle_lr can't make a schedule: ValueError: "):
        learning_rate(train_recipe("one_cycle_lr", {"max_lr": 1.0, "cycle_momentum": False}), pipeline_of(1), NUM_TRAIN)
    below = {"base_lr": -1.0, "max_lr": 0.5, "cycle_momentum": False}
    with pytest.raises(
        UserCodeError, match=r"train.schedule.name: cyclic_lr gives a rate of -1, needed is one of at le"
    ):
        learning_rate(train_recipe("cyclic_lr", below), pipeline_of(1), NUM_TRAIN)


@pytest.mark.parametrize(
    ("scaling", "pipeline", "expected"),
    [
        ("linear", pipeline_of(1), [1.0]),
        ("linear", pipeline_of(4, flushes=True), [4.0]),
        ("linear", pipeline_of(3, 1, 2), [3.0, 1.0, 2.0]),
        ("linear", pipeline_of(2, 2, flushes=True, accumulate=4), [8.0, 8.0]),
        ("linear", pipeline_of(1, 1, accumulate=2), [2.0, 2.0]),
        ("sqrt", pipeline_of(4, flushes=True), [2.0]),
        ("sqrt", pipeline_of(9, 4), [3.0, 2.0]),
        ("replicas", pipeline_of(3, 1, 2, accumulate=2), [1.0, 1 / 3, 2 / 3]),
        ("replicas", pipeline_of(3, 1, 2, flushes=True), [1.0, 1.0, 1.0]),  # all average over the same minibatches
        ("none", pipeline_of(3, 1), [1.0, 1.0]),
    ],
)
def test_rates_scale_with_samples_per_update(scaling: str, pipeline: Pipeline, expected: list[float]) -> None:
    """Goyal et al. (2017), section 2.1: k times the minibatch, k times the rate; Krizhevsky (2014): its root."""
    train = train_recipe("exponential_lr", {"gamma": 0.5}, lr_scaling=scaling)
    assert lr_scales(train, pipeline) == pytest.approx(expected)
    rate = learning_rate(train, pipeline, NUM_TRAIN)
    for stage, epoch in itertools.product(range(len(expected)), range(3)):
        assert rate(stage, epoch * NUM_TRAIN, SIZE) == pytest.approx(LR * expected[stage] * 0.5**epoch)


def test_scaled_rates_warm_up_from_zero_to_the_scaled_rate() -> None:
    train = TrainRecipe(
        minibatch_size=SIZE,
        max_epochs=EPOCHS,
        optimizer=OptimizerRecipe(lr=LR, lr_scaling="linear"),
        schedule=ScheduleRecipe(warmup_epochs=2),
    )
    rate = learning_rate(train, pipeline_of(4, flushes=True), 100)
    assert [rate(0, before, 40) for before in (0, 40, 80, 160, 200)] == pytest.approx(
        [4 * LR * share for share in (0.2, 0.4, 0.6, 1.0, 1.0)]
    )


def test_recipes_may_name_every_scaling() -> None:
    assert CHOICES["train.optimizer.lr_scaling"] == tuple(LR_SCALINGS)


def rate_of(schedule: ScheduleRecipe) -> Any:
    given = TrainRecipe(minibatch_size=10, max_epochs=10, schedule=schedule, optimizer=OptimizerRecipe(lr=1.0))
    return learning_rate(given, pipeline_of(1), num_train=100)


def test_learning_rate_schedules() -> None:
    step = rate_of(ScheduleRecipe("step", every_epochs=3, factor=0.1))
    assert [step(0, before, 10) for before in (0, 299, 300, 599, 600)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    often = rate_of(ScheduleRecipe("step", every_epochs=1.1, factor=0.1))  # 0.2.0 fell one update late: 1.1 * 100 > 110
    assert [often(0, before, 10) for before in (100, 110, 210, 220)] == pytest.approx([1, 0.1, 0.1, 0.01])
    cosine = rate_of(ScheduleRecipe("cosine", warmup_epochs=1))
    assert [cosine(0, before, 10) for before in (0, 10, 90, 100)] == pytest.approx([0.1, 0.2, 1.0, 1.0])
    assert cosine(0, 550, 10) == pytest.approx(0.5)
    assert 0 < cosine(0, 990, 10) < 0.001
    polynomial = rate_of(ScheduleRecipe("polynomial", power=2, warmup_epochs=1))
    assert [polynomial(0, before, 10) for before in (0, 90, 100, 500, 900)] == pytest.approx([0.1, 1, 0.81, 0.25, 0.01])
    assert rate_of(ScheduleRecipe())(0, 12345, 10) == 1.0


@pytest.mark.parametrize(
    ("schedule", "annealing_epochs", "expected"),
    [
        (ScheduleRecipe(), 4.0, 4.0),
        (ScheduleRecipe(), None, 2.5),  # a quarter of ten epochs
        (ScheduleRecipe("step", every_epochs=4, factor=1.0), None, 1.0),  # of the time until the first drop
        (ScheduleRecipe(warmup_epochs=1), None, 5.0),  # five warm-ups
    ],
)
def test_pipemare_s_rates_grow_to_the_recipe_s(
    schedule: ScheduleRecipe, annealing_epochs: float | None, expected: float
) -> None:
    """Stage i of 4 has lr / tau_i^p, p = 1 - min(k / K, 1), tau_i = 3 - i, where that is more than 1."""
    given = TrainRecipe(minibatch_size=10, max_epochs=10, schedule=schedule, optimizer=OptimizerRecipe(lr=1.0))
    pipeline = Pipeline((1,) * 4, chain(4), "1f1b", False, 4, weights="correct")
    rate = learning_rate(given, pipeline, 100, annealing_epochs)
    plain = learning_rate(given, replace(pipeline, weights="stash"), 100, annealing_epochs)
    for before in (0, 50, 100, 200, 390, 500, 990):
        p = 1 - min(before / 100 / expected, 1)
        for stage, tau in enumerate((3, 2, 1, 1)):
            assert rate(stage, before, 10) == pytest.approx(plain(stage, before, 10) / tau**p)
    assert learning_rate(given, pipeline, 100, 0.0)(0, 0, 10) == plain(0, 0, 10)


def with_warmup(optimizer: torch.optim.Optimizer, num_warmup_steps: int = 0) -> None:
    """As functions of transformers that make a scheduler."""
    raise AttributeError(optimizer)


class CosineLRScheduler:
    """As timm's, which derives from no class of torch."""


@pytest.mark.parametrize("name", ["with_warmup", "CosineLRScheduler"])
def test_schedulers_of_other_packages_are_refused_as_torch_s_are(name: str) -> None:
    """0.2.0: 'float' object has no attribute 'param_groups' was all that was said."""
    with pytest.raises(UserCodeError, match=f"{name} counts steps, .* needed is a function of the fraction"):
        own_schedule(ScheduleRecipe(name=None, target=f"{__name__}:{name}"))
