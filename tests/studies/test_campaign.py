"""The campaign's draws, judgements and page, and its points in an undisturbed run."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pipebench import __version__
from pipebench.checkpoint.state import ModelState
from pipebench.checkpoint.store import Checkpoints
from pipebench.schedule.modes import MODES
from reports.studies.campaign.cases import CASES, DISTRIBUTED, LAST, VIRTUAL, write_recipe
from reports.studies.campaign.drawing import ENDINGS, KILLS, KINDS, SPOIL, Trial, draw, num_kills
from reports.studies.campaign.judging import other_bits, problems_of
from reports.studies.campaign.page import PAGES, WHOLE, Findings, draw_picture, page
from reports.studies.campaign.points import FOLDER, PLAN, POINTS, Moment, Watch, answered, asked
from reports.studies.campaign.spoilt import DAMAGE, WAYS, Spoilt, damage, own_lines, spoilt_cases
from reports.studies.campaign.trial import Done, Outcome


@pytest.fixture(scope="module")
def drawn() -> list[Trial]:
    return draw(0, 280)


def test_a_campaign_covers_every_mode_in_both_engines_with_two_to_four_processes(drawn: list[Trial]) -> None:
    killed = [trial for trial in drawn if any(fault.kind in KILLS for fault in trial.faults)]
    assert sum(num_kills([trial]) for trial in drawn if trial.name.startswith("kill")) == 280
    assert {trial.case for trial in killed} == {*CASES}
    for engine in (VIRTUAL, DISTRIBUTED):
        assert {case.mode for case in CASES if case.engine == engine} == {*MODES}
    for mode in MODES.keys() - {"single"}:
        counts = {2, 4} if MODES[mode].shape == "even" else {2, 3}
        assert {c.num_processes for c in CASES if c.mode == mode and c.in_processes} == counts, mode
    assert {fault.kind for trial in drawn for fault in trial.faults} == {*KINDS, *ENDINGS}


def test_drawn_disturbances_can_occur(drawn: list[Trial]) -> None:
    assert len({trial.name for trial in drawn}) == len(drawn)
    for trial in drawn:
        steps = [fault.moment.step for fault in trial.faults if fault.moment.step]
        assert steps == sorted(steps), trial
        for number, fault in enumerate(trial.faults):
            moment = fault.moment
            assert moment.point in POINTS
            assert 0 <= moment.rank < trial.case.num_processes
            assert all(rank < trial.case.num_processes for rank in fault.victims)
            assert moment.step <= LAST
            assert number or moment.step, "the first one comes after a checkpoint"


def test_a_seed_draws_the_same_again_and_another_one_something_else(drawn: list[Trial]) -> None:
    assert draw(0, 280) == drawn != draw(1, 280)


def test_only_requested_cases_are_drawn() -> None:
    found = draw(7, 20, "dp 2")
    assert sum(num_kills([trial]) for trial in found if trial.name.startswith("kill")) == 20
    assert all("dp 2" in trial.title for trial in found)
    found = draw(7, 20, "zero1,fsdp")
    assert {trial.case.mode for trial in found} == {"zero1", "fsdp"}
    assert {case.mode for case in spoilt_cases("zero1,fsdp")} == {"zero1", "fsdp"}
    assert draw(0, 20, "no such mode") == []
    assert all(SPOIL in trial.title for trial in draw(0, 20, SPOIL))


def test_a_process_stops_at_its_moment_and_at_no_other(tmp_path: Path) -> None:
    moments = [Moment("segment", 12, 1), Moment("part", 24, 0), Moment("segment", 30, 1)]
    (tmp_path / PLAN).write_text(json.dumps([asdict(each) for each in moments]))
    for index in range(3):
        answered(tmp_path, index).touch()
    first, second = Watch(tmp_path, 0), Watch(tmp_path, 1)
    for watch, point, step in (
        (first, "segment", 12), (second, "segment", 6), (second, "part", 12), (first, "part", 30),
    ):  # fmt: skip
        watch.reached(point, step)
    assert not asked(tmp_path, 0).exists()
    second.reached("segment", 18)
    first.reached("part", 24)
    assert json.loads(asked(tmp_path, 1).read_text())["step"] == 24
    second.reached("segment", 24)
    assert not asked(tmp_path, 2).exists()
    second.reached("segment", 30)
    assert asked(tmp_path, 2).exists()


@pytest.mark.slow
def test_runs_reach_the_points(tmp_path: Path) -> None:
    """In a new process, whose functions are wrapped; without a disturbance, it has the undisturbed bits."""
    live, drained = (next(case for case in CASES if case.special == name) for name in ("live moves", "repartitions"))
    points = ["model", "segment", "instruction", "hand over", "part", "part written", "manifest", "committed", "pruned"]
    points += ["evaluation", "evaluated", "result", "recut", "shards"]
    assert {*points} == POINTS.keys() - {"restored", "finish", "finished"}, "those need a command"
    questions = tmp_path / "questions"
    questions.mkdir()
    moments = [Moment(point, 0, 0, 3 if point == "instruction" else 0) for point in points]
    (questions / PLAN).write_text(json.dumps([asdict(each) for each in moments]))
    for index in range(len(points)):
        answered(questions, index).touch()
    lines = []
    sharded = next(case for case in CASES if case.shards)
    for name, case in (("live", live), ("drained", drained), ("again", live), ("sharded", sharded)):
        (tmp_path / name).mkdir()
        stops = [15] if name == "again" else []
        question = {"recipe": str(write_recipe(tmp_path)), "words": case.words, "stops": stops}
        lines.append(json.dumps({**question, "out": str(tmp_path / name)}))
    root = Path(__file__).parents[2]
    settings = {FOLDER: str(questions), "PYTHONPATH": str(root), "PIPEBENCH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "reports.studies.campaign.reference"], input="\n".join(lines), text=True,
        cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["done"] * 4, done
    assert [point for index, point in enumerate(points) if not asked(questions, index).exists()] == []
    assert [*other_bits(tmp_path / "live", tmp_path / "live")] == []
    assert any("other parameters" in problem for problem in other_bits(tmp_path / "live", tmp_path / "again")), (
        "a drain more gives other bits without a flush"
    )


def checkpoint(folder: Path, value: float, *, step: int = 6, loss: float = 1.0, count: float = 1.0) -> Path:
    """Write two checkpoints of one parameter, and return their folder."""
    store = Checkpoints(folder)
    for at in (step - 1, step):
        tensor = torch.full((64,), value)
        parts = [
            store.write_part(
                at,
                f"stage-{index}",
                ModelState(
                    {f"{index}.w": tensor + at},
                    {f"{index}.w": {"m": tensor}},
                    {f"{index}.mean": torch.full((1,), count)},
                ),
            )
            for index in range(2)
        ]
        points = [{"samples": 4 * at, "clock_s": 0.0, "metrics": {"eval_loss": loss}}]
        store.commit(at, parts, {"points": points})
    return folder


def test_bits_are_compared(tmp_path: Path) -> None:
    expected = checkpoint(tmp_path / "a", 1.0)
    assert [*other_bits(checkpoint(tmp_path / "b", 1.0), expected)] == []
    assert [*other_bits(checkpoint(tmp_path / "c", 1.5), expected)] == [
        "other parameters, by up to 5.0e-01", "other optimizer",
    ]  # fmt: skip
    # Replicas' averages may differ by rounding without a fault; larger differences are faults.
    assert [*other_bits(checkpoint(tmp_path / "f", 1.0, count=1.0 + 1e-7), expected)] == []
    assert [*other_bits(checkpoint(tmp_path / "g", 1.0, count=1.01), expected)] == ["other buffers, by up to 1.0e-02"]
    assert [*other_bits(checkpoint(tmp_path / "d", 1.0, step=7), expected)] == [
        "the last checkpoint is of step 7 instead of 6"
    ]
    (problem,) = other_bits(checkpoint(tmp_path / "e", 1.0, loss=1.1), expected)
    assert problem == "eval_loss after 24 samples is 1.1 instead of 1.0"
    (problem,) = other_bits(tmp_path / "none", expected)
    assert problem.startswith("the last checkpoint can't be read")


def test_records_are_judged() -> None:
    curves = {"curves/eval_loss": [(72, 1.0), (144, 0.9)], "best_eval_loss": [(0, 0.9)]}
    fine: dict[str, Any] = {"runs": [{"status": "FINISHED"}], "metrics": curves}
    assert [*problems_of(fine, 2)] == []
    assert [*problems_of({**fine, "runs": []}, 2)] == ["MLflow has 0 runs"]
    assert [*problems_of({**fine, "runs": [{"status": "RUNNING"}]}, 2)] == ["MLflow's status is RUNNING"]
    twice = {**fine, "metrics": {**curves, "best_eval_loss": [(0, 0.9), (0, 0.9)]}}
    assert [*problems_of(twice, 2)] == ["MLflow has 1 single metrics, best_eval_loss for one, more than once at a step"]
    assert [*problems_of(fine, 4)] == ["MLflow has 2 evaluations instead of 4"]


@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_leaves_no_valid_newest_checkpoint(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    way = sorted(DAMAGE)[number]
    folder = checkpoint(tmp_path / "checkpoints", 1.0)
    chance = Random(number)
    monkeypatch.setattr(chance, "choice", lambda found: way if way in found else found[0])
    assert damage(folder, chance) == way
    found, skipped = Checkpoints(folder).latest()
    assert found is not None
    assert (found.step, len(skipped)) == (5, 1)


def test_a_slow_command_still_refuses_in_one_sentence() -> None:
    said = "pipebench run: loading torch\npipebench: model.target: executes m:n from m.py, of user a\n"
    assert own_lines(said + "pipebench: error: run a is running\n") == ["pipebench: error: run a is running"]


def outcome(**changes: object) -> Outcome:
    kill = Done(KILLS[0], "manifest", 12, 4.0, 6)
    return replace(Outcome("kill-0", "dp 2 distributed", "dp", DISTRIBUTED, [kill]), **changes)  # type: ignore[arg-type] # by name


def test_the_page_has_the_disturbances_and_losses(tmp_path: Path) -> None:
    stopped = outcome(name="stop-0", done=[Done("SIGINT", "segment", 18, 5.0, 0)], signal_s=[("SIGINT", 0.5)])
    rows = [asdict(Spoilt(way, "dp 2 virtual", "refused")) for way in WAYS]
    found = Findings(
        {"seed": 3, "kills": 1, "only": ""}, [outcome(), stopped], {"x": {"rows": rows, "problems": []}}, 90
    )
    assert found.fine
    text = page(found)
    for line in (
        "1 kills and 1 other faults in 2 runs, all recovered; 0 came too late;",
        "; 19 damaged checkpoints, all handled.",
        "| kill a worker | 1 | 1 of 1 | 4 (4) | 6 (6) | - |",
        "| SIGINT | 1 | 1 of 1 | 5 (5) | 0 (0) | 0.5 (0.5) |",
        "| dp | 0 | 0 | 0 | 0 | 2 | 1 | 1 | 0 |",
        "| manifest | the manifest is written, not renamed | 0 | 1 |",
        "| part empty | 1 | 1 | 0 | 0 |",
        "None.",
    ):
        assert line in text
    lost = replace(found, outcomes=[outcome(problems=["other parameters"])], left=2)
    assert not lost.fine
    assert "1 runs lost something; 0 came too late; 19 damaged checkpoints, all handled; parts left to do: 2." in page(
        lost
    )
    assert "- kill-0 (dp 2 distributed): other parameters" in page(lost)
    assert Outcome.of(json.loads(json.dumps(asdict(stopped)))).done == stopped.done
    draw_picture(found, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 1000


def test_the_stored_page_shows_its_picture() -> None:
    """It showed that of 200 kills, long after a campaign had 280."""
    for name, arguments in PAGES.items():
        picture = f"![seconds until training continues]({name}.png)"
        assert picture in page(Findings(arguments, [outcome()], {}, 90))
        assert picture not in page(Findings({**arguments, "seed": 3}, [outcome()], {}, 90))


def test_a_page_names_its_command_and_what_it_was_made_with() -> None:
    text = page(Findings({"seed": 3, "kills": 280, "only": "zero1,fsdp"}, [outcome()], {}, 90))
    assert text.startswith("# The campaign of zero1, fsdp: ")
    assert "`nox -s campaign -- --seed 3 --only zero1,fsdp` makes this page." in text
    assert f"Seed 3; 2 minutes, if all runs' are added; {date.today()}, pipebench {__version__}, torch " in text
    assert "`nox -s campaign` makes this page." in page(Findings(WHOLE, [outcome()], {}, 90))
