"""Console output: progress, the summary of a run, seeds and comparisons."""

import io
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipebench.show import console
from pipebench.show import progress as shown
from pipebench.show.progress import RunProgress, preparing
from pipebench.show.terminal import is_terminal, standard_output
from pipebench.show.verdict import comparison_markdown
from pipebench.simulate.meter import PREDICTION, WORKERS_IDLE
from pipebench.tracking.summary import summarise_seeds
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, Point, RunResult
from pipebench.typed_json import read, write
from tests.results import DP, PIPEDREAM

BARE = replace(PIPEDREAM, name="quickstart-bare", outcome=COMPLETED, metrics={}, stages=({},))


def plain(width: int = 110) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_the_summary_has_all_results_of_a_run() -> None:
    to = plain()
    console.print_summary(DP, "stage 0  F0 B0", "pipebench ui", to)
    lines = written(to).splitlines()
    assert "quickstart-dp: reached top1 0.95 (top1 0.957) after 3 epochs" in lines
    facts = {line[2:18].strip(): line[20:].strip() for line in lines if line.startswith("  ")}
    assert facts["plan"] == "4 (dp, seed 0, virtual engine, virtual clock)"
    assert facts["durations"] == "roofline of V100"
    assert facts["time to accuracy"] == "6.00 s (5.50 s training, 400 ms evaluation, 100 ms checkpoints)"
    assert facts["this took"] == "12.0 s, after 3.00 s of preparing"
    assert facts["epochs"] == "3 to the target, 1.80 s each"
    assert facts["throughput"] == "2,222 samples/s, 128 samples per update"
    assert facts["sent per sample"] == (
        "300 kB (activation 100 kB, all-reduce 200 kB); 3.00 GB in all; buffers 1.00 kB in all"
    )
    assert facts["workers idle"] == "14.1% bubble, 12.0% waiting for communication"
    assert facts["memory"] == "3.00 MB at most on a worker, 1 weight version at most"
    assert "  stage 0  F0 B0" in lines
    assert "  MLflow  pipebench ui" in lines
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize("picture", ["stage 0  F0 B0", "stage 0  F0 B0 E0"])
def test_the_legend_explains_evaluations_if_there_are_any(picture: str) -> None:
    to = plain()
    console.print_summary(DP, picture, "pipebench ui", to)
    assert ("E: forward of an evaluation" in " ".join(written(to).split())) == ("E0" in picture)


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("stage 0  F0 B0 F10", "F3: forward of minibatch 3; B: backward"),
        ("stage 0  F0.1 . U0", "F3.1: forward of minibatch 3's microbatch 1; U: update; . : waiting"),
    ],
)
def test_the_legend_explains_only_what_the_picture_shows(picture: str, expected: str) -> None:
    """It explained updates that weren't drawn, and called `F0.1` minibatch or microbatch."""
    to = plain()
    console.print_summary(DP, picture, "", to)
    assert f"  {expected}; time goes to the right\n" in written(to)


def test_the_summary_has_the_time_of_copies() -> None:
    to = plain()
    console.print_summary(replace(DP, metrics={**DP.metrics, "swap_stall_fraction": 0.031}), "", "", to)
    assert "12.0% waiting for communication, 3.1% waiting for what was swapped\n" in written(to)


def test_the_summary_has_a_row_per_worker_and_the_prediction() -> None:
    row = {"worker": 0, "stage": 1, "rank": 2, "compute_s": 5.0, "waiting_s": 3.0, "sending_s": 0.5, "other_s": 1.5}
    workers = ({**row, "all_reduce_s": 0.0, "bubble_fraction": 0.5, "waiting_norm_s": 0.0},)
    to = plain()
    console.print_summary(
        replace(DP, workers=workers, metrics={**DP.metrics, "predicted_epoch_time_s": 1.5}), "", "", to
    )
    lines = [line.split() for line in written(to).splitlines()]
    assert ["worker", "stage", "rank", "compute", "waiting", "sending", "other", "all-reduce", "bubble"] in lines
    assert ["0", "1", "2", "5.00", "s", "3.00", "s", "500", "ms", "1.50", "s", "0", "s", "50.0%"] in lines
    assert ["prediction", "epoch", "1.50", "s", "predicted,", "1.80", "s", "measured", "(+20.0%)"] in lines


def test_copies_have_a_column_if_a_worker_makes_them() -> None:
    row = {"worker": 0, "stage": 1, "compute_s": 5.0, "sending_s": 0.5, "swapping_s": 0.25, "other_s": 1.5}
    to = plain()
    console.print_summary(replace(DP, workers=(row,)), "", "", to)
    lines = [line.split() for line in written(to).splitlines()]
    assert ["worker", "stage", "compute", "sending", "swapping", "other"] in lines
    assert ["0", "1", "5.00", "s", "500", "ms", "250", "ms", "1.50", "s"] in lines


def test_a_note_is_beside_its_number() -> None:
    notes = {PREDICTION: "4 processes x 1 thread share 2 usable cores", WORKERS_IDLE: "times aren't known"}
    crowded = replace(DP, metrics={**DP.metrics, "predicted_epoch_time_s": 1.5}, notes=notes)
    to = plain(160)
    console.print_summary(crowded, "", "", to)
    text = " ".join(written(to).split())
    assert "1.80 s measured (+20.0%); 4 processes x 1 thread share 2 usable cores" in text
    assert "waiting for communication; times aren't known" in text
    to = plain()
    console.print_comparison([crowded, PIPEDREAM, replace(crowded, name="quickstart-gpipe")], "", to)
    assert "dp, gpipe: prediction: 4 processes x 1 thread share 2 usable cores" in written(to)
    assert "- dp: workers idle: times aren't known" in comparison_markdown([crowded, PIPEDREAM]).splitlines()
    assert read(RunResult, write(crowded)) == crowded


def test_the_summary_has_a_row_per_stage() -> None:
    to = plain()
    console.print_summary(DP, "", "", to)
    assert any(line.split() == ["0", "53", "4", "1", "700", "us", "1"] for line in written(to).splitlines())


@pytest.mark.parametrize("outcome", [MISSED, DIVERGED, INTERRUPTED])
def test_a_run_without_a_time_says_why(outcome: str) -> None:
    to = plain()
    console.print_summary(replace(DP, outcome=outcome), "", "", to)
    assert f"none: {outcome}" in written(to)
    assert "6.00 s" not in written(to)
    if outcome != MISSED:
        to = plain()
        console.print_summary(replace(DP, outcome=outcome, recipe={"train.target": "null"}), "", "", to)
        assert "time to accuracy" not in written(to), "which is of a target"


def test_a_summary_needs_only_the_sentence() -> None:
    to = plain()
    console.print_summary(BARE, "", "", to)
    console.print_comparison([BARE], "", to)
    assert "quickstart-bare" in written(to)


def test_brackets_in_names_are_no_markup() -> None:
    to = plain()
    console.print_summary(replace(DP, name="a[bold]b", sentence="[/red]"), "[x]", "[y]", to)
    assert "a[bold]b: [/red]" in written(to)


def test_a_comparison_fits_a_terminal_of_80_columns() -> None:
    to = plain(80)
    console.print_comparison([DP, PIPEDREAM], "", to)
    lines = [line.split() for line in written(to).splitlines()]
    assert ["dp", "4", "128", "2,222", "6.00", "s", "1.00x", "3", "1.80", "s"] in [line[:10] for line in lines]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_nothing_of_a_summary_is_wider_than_the_terminal_and_no_word_is_broken(width: int) -> None:
    to = plain(width)
    long = replace(DP, name="gnmt8-3x4-a-pipedream")
    console.print_summary(long, "", "", to)
    console.print_comparison([long, replace(PIPEDREAM, name="gnmt16-4x4-a-dp")], "", to)
    lines = written(to).splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    expected = {"accuracy", "replicas", "versions", "straight", "bubble", "14.1%", "gnmt8-3x4-a-pipedream", "53", "kB"}
    assert expected <= words


def test_seeds_have_median_and_spread() -> None:
    timed = [
        replace(DP, seed=n, metrics={**DP.metrics, "time_to_accuracy_s": each}) for n, each in enumerate((6.0, 8.0))
    ]
    results = [*timed, replace(DP, outcome=MISSED)]
    to = plain()
    console.print_seeds("quickstart-dp", results, summarise_seeds(results), to)
    assert "quickstart-dp: 3 seeds, 2 of 3 reached the target" in written(to)
    rows = [line.split() for line in written(to).splitlines()]
    assert ["time_to_accuracy_s", "8.00", "s", "6.00", "s", "-", "-", "-"] in rows, "a miss takes infinitely long"
    to = plain()
    console.print_seeds("quickstart-dp", timed, summarise_seeds(timed), to)
    rows = [line.split() for line in written(to).splitlines()]
    assert ["time_to_accuracy_s", "7.00", "s", "6.00", "s", "8.00", "s", "7.00", "s", "1.41", "s"] in rows


def test_seeds_that_differ_by_rounding_have_no_spread() -> None:
    times = [1.8, 1.8 * (1 + 1e-15), 1.8 * (1 - 1e-15)]
    results = [replace(DP, seed=seed, metrics={**DP.metrics, "epoch_time_s": each}) for seed, each in enumerate(times)]
    assert summarise_seeds(results)["epoch_time_s_std"] == 0
    to = plain()
    console.print_seeds("quickstart-dp", results, summarise_seeds(results), to)
    assert "ns" not in written(to)


def test_groups_of_a_comparison_are_headed_by_their_differences() -> None:
    to = plain()
    results = [
        replace(result, name=f"{result.mode}-{servers}", recipe={"cluster.servers": str(servers)})
        for servers in (1, 3)
        for result in (DP, PIPEDREAM)
    ]
    console.print_comparison(results, "", to)
    lines = [line.split() for line in written(to).splitlines() if line.strip()]
    assert [line[0] for line in lines if len(line) == 1 and "=" in line[0]] == [
        "cluster.servers=1",
        "cluster.servers=3",
    ]
    assert [line[0] for line in lines if line[1:3] in (["4", "128"], ["straight", "128"])] == [
        "pipedream-1", "dp-1", "pipedream-3", "dp-3"
    ]  # fmt: skip


def test_without_a_terminal_there_is_a_line_per_evaluation() -> None:
    to = plain()
    with RunProgress("dp", 1000, quiet=True, samples_per_epoch=500, console=to) as progress:
        for samples in range(0, 500, 10):
            progress.update(samples, 0.001 * samples, 2.0, 0.5)
        progress.evaluation(Point(500, 0.6, {"train_loss": 0.25, "top1": 0.9}), 1.0)
    first, line = written(to).splitlines()
    assert first == "dp  training, at most 2 epochs"
    assert line.startswith("dp  epoch 1  train_loss 0.250  top1 90.0%  virtual time 600 ms  wall ")


def test_without_a_terminal_lines_between_evaluations_come_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now_s))
    to = plain()
    told_s = []
    with RunProgress("dp", 100_000, quiet=True, samples_per_epoch=1000, console=to) as progress:
        for second in range(7200):
            now_s, before = float(second), written(to)
            progress.update(second, 0.001 * second, 2.0, 0.5)
            told_s += [second] if written(to) != before else []
    assert told_s[:6] == [10, 20, 30, 45, 68, 102]
    assert max(after - before for before, after in itertools.pairwise(told_s)) == 600
    assert len(told_s) < 25
    assert "dp  epoch 0.0 of at most 100  loss 2.00  virtual time 10.0 ms  wall 10.0 s" in written(to)


def test_the_number_of_a_beginning_run_is_printed() -> None:
    to = plain()
    console.print_position(2, 4, "quickstart-gpipe", to)
    assert written(to).split("\n") == ["", "2 of 4  quickstart-gpipe", ""]


def test_on_a_terminal_there_is_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: float(next(now_s))))
    to = Console(file=io.StringIO(), width=120, force_terminal=True, highlight=False, color_system=None)
    with RunProgress("dp", 1000, quiet=False, samples_per_epoch=500, console=to) as progress:
        progress.update(250, 0.3, 2.0, 0.5)
        progress.evaluation(Point(500, 0.6, {"train_loss": 0.25, "top1": 0.9}), 1.0)
        progress.update(750, 0.9, 0.125, 0.75)
    text = written(to)
    assert "epoch 0.5 of at most 2 loss 2.00" in text
    assert "epoch 1.5 of at most 2 loss 0.125 top1 90.0%" in text
    assert "virtual time 900 ms 75.0% busy" in text
    assert "samples/s wall 0:00:" in text
    assert "+ at most 0:00:" in text
    assert "epoch 1  train_loss 0.250" in text


def test_updates_are_drawn_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: 1.0))
    to = Console(file=io.StringIO(), width=120, force_terminal=True, highlight=False, color_system=None)
    with RunProgress("dp", 1000, quiet=False, samples_per_epoch=10, console=to) as progress:
        for samples in range(1000):
            progress.update(samples, 0.0, 1.0, 0.0)
        drawn = written(to)
    assert "epoch 0.0 of at most 100" in drawn
    assert "epoch 0.1 of" not in drawn


def test_preparing_writes_nothing_without_a_terminal() -> None:
    to = plain()
    with preparing("dp", to) as on_progress:
        on_progress("measuring layer 1 of 2 at 8 samples")
    assert written(to) == ""


def test_preparing_a_run_is_reported_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first line at once; after two seconds one with the current step, and then one in ten seconds."""
    now_s, timers = 0.0, list[threading.Timer]()

    class Noted(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(shown, "Timer", Noted)
    to = plain()
    with preparing("dp", to, prints_lines=True) as on_progress:
        for layer in range(20):
            now_s = float(layer)
            on_progress(f"measuring layer {layer} of 20 at 8 samples")
            if layer == timers[0].interval:
                timers[0].function()
    lines = [f"dp  measuring layer {layer} of 20 at 8 samples" for layer in (2, 12)]
    assert written(to).splitlines() == ["dp  preparing", *lines]


def test_preparing_on_a_terminal_removes_its_line() -> None:
    to = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with preparing("dp", to) as on_progress:
        on_progress("measuring layer 1 of 2 at 8 samples")
    assert written(to).endswith("\x1b[2K")


def test_standard_output_of_a_test_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_terminal()
    console.print_comparison([DP, PIPEDREAM], "pipebench ui", standard_output())
    assert "MLflow  pipebench ui" in capsys.readouterr().out


def test_rounding_differences_are_not_shown_as_a_part_of_the_time() -> None:
    metrics = {"time_to_accuracy_s": 0.04, "evaluation_time_s": 0.004, "time_to_accuracy_checkpoint_s": 7e-18}
    assert [*console.parts_of_time(metrics, to_target=True)] == ["training", "evaluation"]


def test_evaluations_after_the_target_do_not_count_in_the_time_to_it() -> None:
    """A run that goes on with an easier target has reached it some evaluations ago: 0.2.0 took all of them off."""
    metrics = {"time_to_accuracy_s": 4.0, "time_to_accuracy_without_evaluation_s": 3.5, "evaluation_time_s": 2.0}
    assert console.parts_of_time(metrics, to_target=True) == {"training": 3.5, "evaluation": 0.5}
