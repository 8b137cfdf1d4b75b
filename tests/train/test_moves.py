"""Moves of layers in runs: at the minibatches asked for, recorded, resumed and repeated."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.admission import StopRequest
from pipebench.errors import PlanError, RecipeError
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.planned import BALANCED, MovesPlanned, planned_moves, under
from pipebench.extensions.moves.recipe import FILE_NAME, AskedMove, load_moves, parse_moves, to_text
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.settings import MOVES
from pipebench.model.plan import recut
from pipebench.model.plan_layers import form_of
from pipebench.recipe.schema import PeriodRecipe
from pipebench.schedule.modes import RECOMPUTE
from pipebench.schedule.operations import MIGRATION
from pipebench.simulate.meter import CUT_ANEW
from pipebench.train.checkpointing import NO_CHECKPOINTS, CheckpointPolicy, resume_point
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.periods import Periods
from pipebench.train.result import RunResult
from pipebench.typed_json import JsonError
from tests.engine.test_streams import text_setup
from tests.support import Blobs, Mlp, make_engine, make_setup
from tests.train.test_training import Silent, recipe

FIRST, LAST = [2, 4], ("body_1", "body_6")
WRITTEN = [{"at": {"minibatches": 5}, "cuts": ["body_4", "body_5"]}, {"at": {"epochs": 1}, "cuts": list(LAST)}]
PER_EPOCH = 12


PERIODS = Periods(24, 7, 7)


def job(
    moves: Any, *, every: int = 7, epochs: int = 2, live: bool = False, balances: bool = False, starts: Any = FIRST
) -> Job:
    """Return epochs of twelve minibatches that evaluate after every seventh."""
    setup = make_setup(Mlp(), (starts, [1] * (len(starts) + 1)), dataset=Blobs(num_train=46))
    setup = moving(setup, live=live, balances=balances)
    asked = recipe(target=None, max_epochs=epochs, evaluate_every=PeriodRecipe(minibatches=every))
    periods = Periods.of(asked.train, setup.sampler.minibatches_per_epoch)
    planned = planned_moves(parse_moves(moves), setup, periods)
    return Job(asked, setup.cluster, setup, extensions={MOVES: MovesPlanned(asked, planned)})


def run(
    given: Job, policy: CheckpointPolicy = NO_CHECKPOINTS, stop_after: float = math.inf
) -> tuple[RunResult, dict[str, torch.Tensor]]:
    """Train, up to where a stop is asked for: after so many samples."""
    engines: list[Any] = []
    stop = StopRequest()
    make = on_virtual_clock(given, stop)

    class Stopping(Silent):
        def update(self, samples: int, clock_s: float, loss: float, busy_fraction: float) -> None:
            stop.reason = "interrupted" if samples >= stop_after else None

    def keep(*callbacks: Any) -> Any:
        engines.append(make(*callbacks))
        return engines[0]

    result, _ = TrainingLoop(given, keep, Stopping(), lambda point: None, policy).run()
    return result, {name: tensor.clone() for r in engines[0].replicas for name, tensor in r.tensors().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def by_hand(given: Job, drains: Sequence[int], plans: dict[int, list[int]]) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights of an engine that is drained and cut by hand, and the bytes that have moved."""
    engine = make_engine(given.setup)
    for start, stop in zip([0, *drains], drains, strict=False):
        if start in plans:
            engine.replan(recut(given.setup.graph, engine.setup.plan, plans[start]))
        engine.train(start, stop - start)
    moved = sum(count for (kind, _), count in engine.num_bytes.items() if kind == MIGRATION)
    return {name: tensor for r in engine.replicas for name, tensor in r.tensors().items()}, moved


def test_a_run_continues_with_the_cuts_of_its_recipe() -> None:
    result, weights = run(job(WRITTEN))
    expected, moved = by_hand(job(None), [5, 7, 12, 14, 21, 24], {5: [4, 5], 12: [1, 6]})
    assert same(weights, expected)
    assert [point.samples for point in result.points] == [7 * 4, 46 + 8, 46 + 36, 92], (
        "evaluations stay where they were"
    )
    assert [(each.minibatch, each.was, each.cuts) for each in result.moves] == [
        (5, ("body_2", "body_4"), ("body_4", "body_5")),
        (12, ("body_4", "body_5"), LAST),
    ]
    assert result.metrics["repartitions"] == 2
    assert result.metrics["migration_bytes"] == moved > 0
    assert result.metrics["migration_stall_s"] == sum(each.stall_s for each in result.moves) > 0
    assert [(row["first_layer"], row["last_layer"]) for row in result.stages] == [
        ("body_0", "body_0"),
        ("body_1", "body_5"),
        ("body_6", "body_6"),
    ], "the table of stages is the last plan's"
    assert [each.samples for each in result.moves] == [20, 46]


@pytest.mark.parametrize("at", [5, 7])
def test_moves_to_the_current_cuts_cost_nothing(at: int) -> None:
    """The pipeline was drained for them, which changed the weights, and `moves.json` doesn't contain them."""
    asked, weights = run(job([{"at": {"minibatches": at}, "cuts": ["body_2", "body_4"]}]))
    stayed, expected = run(job(None))
    assert same(weights, expected)
    assert asked.moves == ()
    assert asked.metrics["total_time_s"] == stayed.metrics["total_time_s"]
    assert stayed.metrics["repartitions"] == stayed.metrics["migration_bytes"] == 0


@pytest.mark.parametrize("stop", [7, 14, 21])
def test_a_resumed_run_continues_with_the_plan_of_its_checkpoint(tmp_path: Path, stop: int) -> None:
    given = job(WRITTEN)
    whole, weights = run(given)
    store = Checkpoints(tmp_path, keep=9)
    run(given, CheckpointPolicy(store))
    found = resume_point(store.at(stop), given)
    assert [each.minibatch for each in found.progress.moves] == [each for each in (5, 12) if each <= stop]
    again, ended = run(given, CheckpointPolicy(store, found))
    assert same(ended, weights)
    assert again.moves == whole.moves
    assert again.metrics["migration_bytes"] == whole.metrics["migration_bytes"]
    assert store.steps() == [7, 14, 21, 24], "a move is no checkpoint"


@pytest.mark.parametrize(("live", "moves"), [(False, WRITTEN), (True, WRITTEN[1:])])
def test_a_run_stopped_at_the_drain_of_a_move_makes_it_when_resumed(tmp_path: Path, live: bool, moves: Any) -> None:
    """The checkpoint of a stop is written before the moves that are due at its drain, which were then never made."""
    given, store = job(moves, every=12, live=live), Checkpoints(tmp_path)
    at = moves[0]["at"].get("minibatches", PER_EPOCH)
    whole, weights = run(given)
    stopped, _ = run(given, CheckpointPolicy(store), stop_after=given.setup.sampler.samples_before(at) - 1)
    assert (stopped.moves, store.steps()) == ((), [at])
    again, ended = run(given, CheckpointPolicy(store, resume_point(store.at(at), given)))
    assert same(ended, weights)
    assert [(each.minibatch, each.cuts) for each in again.moves] == [(m.minibatch, m.cuts) for m in whole.moves]


def test_a_run_resumed_under_another_plan_begins_with_that(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=9)
    run(job(WRITTEN), CheckpointPolicy(store))
    data = Blobs(num_train=46)
    setup = make_setup(Mlp(), ([3, 5], [1, 1, 1]), dataset=data)
    other = Job(job(None).recipe, setup.cluster, setup)
    result, _ = run(other, CheckpointPolicy(store, resume_point(store.at(14), other)))
    assert [row["first_layer"] for row in result.stages] == ["body_0", "body_3", "body_5"]


@pytest.mark.parametrize("starts", [[3, 5], [4]])
def test_a_run_resumed_under_another_plan_has_none_of_the_moves_before(tmp_path: Path, starts: list[int]) -> None:
    """Its checkpoints contained them, and a run resumed from these trained under the plan after them."""
    before, after = Checkpoints(tmp_path / "before", keep=9), Checkpoints(tmp_path / "after", keep=9)
    run(job(WRITTEN), CheckpointPolicy(before))
    other = job(None, starts=starts)
    result, weights = run(other, CheckpointPolicy(after, resume_point(before.at(14), other)))
    again, ended = run(other, CheckpointPolicy(None, resume_point(after.at(21), other)))
    assert again.moves == result.moves == ()
    assert [row["first_layer"] for row in again.stages] == ["body_0", *(f"body_{start}" for start in starts)]
    assert same(ended, weights)


def test_recorded_moves_are_repeated(tmp_path: Path) -> None:
    result, weights = run(job(WRITTEN))
    path = tmp_path / FILE_NAME
    path.write_text(to_text(result.moves))
    assert load_moves(str(path)) == list(result.moves)
    again, repeated = run(job(str(path)))
    assert same(weights, repeated)
    assert again.moves == result.moves


def test_policies_are_recorded_with_the_cuts() -> None:
    setup = make_setup(Mlp(), (FIRST, [1, 1, 1]), recompute={0, 1})
    setup = moving(setup, live=False)
    (move,) = planned_moves([AskedMove(parse_moves(WRITTEN)[0].at, LAST)], setup, PERIODS)
    names = [layer.name for layer in setup.graph.layers]
    stages = form_of(move.plan, names).stages
    assert [name for stage in stages for name, policy in stage.layers.items() if policy == RECOMPUTE] == names[:2]
    given = AskedMove(parse_moves(WRITTEN)[0].at, LAST, {"body_6": RECOMPUTE})
    (move,) = planned_moves([given], setup, PERIODS)
    assert [stage.memory.count(RECOMPUTE) for stage in move.plan.stages] == [0, 0, 1]
    assert under(setup, ()) == setup.plan


@pytest.mark.parametrize(
    ("moves", "problem"),
    [
        ([{"at": {"minibatches": 5}, "cuts": ["body_4"]}], r"moves\[0\].cuts: got 1, allowed are 2"),
        ([{"at": {"minibatches": 5}, "cuts": ["body_4", "body_x"]}], r"moves\[0\]: .*no layer 'body_x'"),
        ([{"at": {"minibatches": 5}, "cuts": ["body_4", "body_4"]}], r"moves\[0\]: every stage needs at least one"),
        ([WRITTEN[1], WRITTEN[0]], r"moves\[1\].at: got minibatch 5, allowed is one after 12, ascending"),
    ],
)  # fmt: skip
def test_impossible_cuts_are_refused_before_anything_runs(moves: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        job(moves)


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ({"body_x": "swap"}, r"moves\[0\].memory: the model has no layer 'body_x'; did you mean"),
        ({"body_1": "swop"}, r"moves\[0\].memory.body_1: got 'swop', allowed are keep, recompute, swap; did you mean"),
        ({"body_1": "swap"}, r"moves\[0\]: layers of stage 0 swap, and cluster flat doesn't say how fast .* pcie"),
    ],
)
def test_impossible_policies_are_refused_before_anything_runs(memory: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        job([WRITTEN[0] | {"memory": memory}])


@pytest.mark.parametrize("live", [True, False])
def test_recorded_policies_are_repeated(tmp_path: Path, live: bool) -> None:
    """The weights are those of a run without swap and recomputation; times differ."""
    asked = [
        {"at": {"minibatches": 8}, "cuts": ["body_3", "body_5"], "memory": {"body_0": "recompute", "body_4": "keep"}},
        {"at": {"minibatches": 20}, "cuts": ["body_3", "body_5"], "memory": {"body_6": "recompute"}},
    ]  # fmt: skip
    result, weights = run(job(asked, every=24, epochs=3, live=live))
    assert [each.memory for each in result.moves] == [{"body_0": "recompute"}, {"body_6": "recompute"}]
    path = tmp_path / FILE_NAME
    path.write_text(to_text(result.moves))
    again, repeated = run(job(str(path), every=24, epochs=3, live=live))
    assert again.moves == result.moves
    assert same(weights, repeated)
    kept, plain = run(job([asked[0] | {"memory": None}], every=24, epochs=3, live=live))
    assert same(weights, plain) is live, (
        "the second move is of policies alone, and where it drains it changes staleness"
    )
    assert kept.metrics["total_time_s"] < result.metrics["total_time_s"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("at", [24, 25, 99])
def test_moves_after_the_end_are_not_made(live: bool, at: int) -> None:
    """0.2.0 searched for a drain after the last one for ever, if moves were live."""
    early = {"at": {"minibatches": 16}, "cuts": ["body_3", "body_5"]}
    late = {"at": {"minibatches": at}, "cuts": list(LAST)}
    result, weights = run(job([early, late], every=24, live=live))
    expected, same_weights = run(job([early], every=24, live=live))
    assert result.moves == expected.moves
    assert len(result.moves) == 1
    assert same(weights, same_weights)
    assert result.notes[CUT_ANEW] == f"not at minibatch {at}, which the run ends before"
    assert CUT_ANEW not in expected.notes


def test_moves_of_text_keep_every_stream_s_state() -> None:
    setup = text_setup(([1, 2], [1, 1, 1]))
    streams = setup.sampler.streams
    names = [layer.name for layer in setup.graph.layers]
    asked = parse_moves([{"at": {"minibatches": streams + 1}, "cuts": names[2:4]}])
    with pytest.raises(PlanError, match=rf"moves\[0\].at: .*allowed are multiples of train.streams, {streams}"):
        planned_moves(asked, setup, PERIODS)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ([{"at": {"minibatches": 0}, "cuts": []}], r"\[0\].at.minibatches: got 0, allowed is a whole number from 1 on"),
        ([{"at": {}, "cuts": []}], r"\[0\].at: got neither of epochs and minibatches"),
        ([{"at": {"minibatches": 1, "epochs": 1}, "cuts": []}], r"\[0\].at: got both of epochs and minibatches"),
        ([{"at": {"minibatches": 1}}], r"\[0\]: 'cuts' is missing"),
        ([{"at": {"minibatches": 1}, "cut": []}], r"\[0\]: unknown key 'cut'; did you mean 'cuts'"),
    ],
)
def test_an_invalid_move_is_reported_with_its_position(written: Any, problem: str) -> None:
    with pytest.raises(JsonError, match=problem):
        parse_moves(written)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "allowed is an object"),
        ('{"pipebench_moves": 2, "moves": []}', "pipebench_moves: got 2, allowed is 1"),
        (
            '{"pipebench_moves": 1, "moves": [{"minibatch": 5, "cuts": []}, {"minibatch": 5, "cuts": []}]}',
            r"moves\[1\].minibatch: got 5, allowed is one after that of the move before, 5",
        ),
    ],
)
def test_a_file_without_moves_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(text)
    with pytest.raises(RecipeError, match=problem):
        load_moves(str(path))


LIVE = [
    {"at": {"minibatches": 8}, "cuts": ["body_3", "body_5"]},
    {"at": {"minibatches": 20}, "cuts": ["body_2", "body_4"]},
    {"at": {"minibatches": 48}, "cuts": ["body_3", "body_4"]},
]


def test_layers_move_during_training() -> None:
    """The third move is at a drain, where nothing is in flight, with `live` true as well."""
    given = job(LIVE, every=24, epochs=5, live=True)
    result, weights = run(given)
    engine = make_engine(given.setup)
    for at, starts in ((8, (3, 5)), (20, (2, 4))):
        moves_of(engine).announce(Repartition(at, starts))
    engine.train(0, 24)
    engine.train(24, 24)
    engine.replan(recut(given.setup.graph, engine.setup.plan, (3, 4)))
    engine.train(48, 12)
    assert same(weights, {name: tensor for r in engine.replicas for name, tensor in r.tensors().items()})
    assert [(each.minibatch, each.live) for each in result.moves] == [(8, True), (20, True), (48, False)]
    assert [each.stall_s == 0 for each in result.moves] == [True, True, False]
    drained, _ = run(job(LIVE, every=24, epochs=5))
    assert result.metrics["migration_bytes"] >= drained.metrics["migration_bytes"] > 0
    assert result.metrics["total_time_s"] < drained.metrics["total_time_s"]


@pytest.mark.parametrize("live", [True, False])
def test_badly_cut_stages_are_balanced_during_training(tmp_path: Path, live: bool) -> None:
    given = job(None, every=40, epochs=10, live=live, balances=True, starts=[1, 2])
    result, weights = run(given)
    assert {each.why for each in result.moves} == {BALANCED}
    assert {each.live for each in result.moves} == {live}
    assert max(row["forward_s"] for row in result.stages) == 3 < 5
    path = tmp_path / FILE_NAME
    path.write_text(to_text(result.moves))
    again, repeated = run(job(str(path), every=40, epochs=10, live=live, starts=[1, 2]))
    assert same(weights, repeated), "what was decided is what was kept"
    assert [each.cuts for each in again.moves] == [each.cuts for each in result.moves]
    assert again.metrics["total_time_s"] == pytest.approx(result.metrics["total_time_s"])


@pytest.mark.parametrize(("stop", "live"), [(40, True), (80, False)])
def test_a_balancing_run_resumes_from_a_checkpoint(tmp_path: Path, stop: int, live: bool) -> None:
    given = job(None, every=40, epochs=10, live=live, balances=True, starts=[1, 2])
    store = Checkpoints(tmp_path, keep=9)
    whole, _ = run(given, CheckpointPolicy(store))
    again, _ = run(given, CheckpointPolicy(store, resume_point(store.at(stop), given)))
    assert again.stages[0]["last_layer"] == whole.stages[0]["last_layer"]
    assert [each for each in again.moves if each.minibatch <= stop] == [m for m in whole.moves if m.minibatch <= stop]


@pytest.mark.parametrize(
    ("moves", "problem"),
    [
        ([{"at": {"minibatches": 5}, "cuts": list(LAST)}], r"moves\[0\]: .* from minibatch 5 on comes too early"),
        (
            [{"at": {"minibatches": 26}, "cuts": list(LAST)}],
            r"moves\[0\]: .*minibatch 2 on comes too early.*the drain after 24; or set vpipe.live: false",
        ),
        ([{"at": {"minibatches": 8}, "cuts": ["body_5", "body_6"]}], r"moves\[0\]: a layer moves by one stage"),
    ],
)
def test_impossible_live_moves_are_refused_before_anything_runs(moves: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        job(moves, every=24, epochs=5, live=True)


def test_plans_and_modes_without_moves_are_refused() -> None:
    replicated = make_setup(Mlp(), ([2], [2, 1]))
    live = moving(replicated)
    with pytest.raises(PlanError, match=r"parallelism.vpipe: layers move .* only where every stage has one replica"):
        planned_moves([], live, PERIODS)
    with pytest.raises(PlanError, match=r"repartition: stages are balanced where each has one worker, and plan 2-1"):
        planned_moves([], moving(live, live=False, balances=True), PERIODS)
    assert planned_moves([], replicated, PERIODS) == ()


@pytest.mark.parametrize("stop", [18, 19])
def test_a_run_stopped_right_before_a_live_move_resumes(tmp_path: Path, stop: int) -> None:
    """It is too late to move layers with minibatches in flight, so they move at the stop."""
    given, store = job([{"at": {"minibatches": 20}, "cuts": ["body_3", "body_5"]}], live=True), Checkpoints(tmp_path)
    run(job(None, every=stop), CheckpointPolicy(store))
    result, weights = run(given, CheckpointPolicy(store, resume_point(store.at(stop), given)))
    expected, _ = by_hand(job(None), [stop, 21, 24], {stop: [3, 5]})
    assert same(weights, expected)
    assert [(each.minibatch, each.live) for each in result.moves] == [(stop, False)]


def test_a_live_move_that_a_stop_has_made_is_not_made_again(tmp_path: Path) -> None:
    """It was announced, so the drain of the stop made it; the run goes on with some minibatches before its moment."""
    asked = [{"at": {"minibatches": 20}, "cuts": ["body_3", "body_5"]}]
    given, store = job(asked, live=True), Checkpoints(tmp_path)
    run(job([{"at": {"minibatches": 18}, "cuts": ["body_3", "body_5"]}], every=18), CheckpointPolicy(store))
    result, _ = run(given, CheckpointPolicy(store, resume_point(store.at(18), given)))
    assert [each.minibatch for each in result.moves] == [18]
