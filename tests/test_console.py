"""What is printed: progress, the summary of a run, seeds and comparisons."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from pipebench import console
from pipebench.comparison import comparison_rows, epoch_speed_up, speed_up
from pipebench.progress import RunProgress, preparing
from pipebench.result import (
    COMPLETED,
    DIVERGED,
    INTERRUPTED,
    MISSED,
    PREDICTION,
    REACHED,
    WORKERS_IDLE,
    Point,
    RunResult,
)
from pipebench.tracking import summarise_seeds

DP = RunResult(
    name="quickstart-dp",
    mode="dp",
    plan="4",
    engine="virtual",
    clock="virtual",
    timing="roofline of V100",
    seed=0,
    outcome=REACHED,
    sentence="reached top1 0.95 (top1 0.957) after 3 epochs",
    metrics={
        "time_to_accuracy_s": 6.0,
        "time_to_accuracy_without_evaluation_s": 5.5,
        "epochs_to_target": 3.0,
        "epoch_time_s": 1.8,
        "throughput_samples_per_s": 2222.0,
        "samples_per_update": 128,
        "comm_bytes_total": 3e9,
        "comm_bytes_all_reduce": 2e9,
        "comm_bytes_activation": 1e9,
        "comm_bytes_buffers": 1e3,
        "comm_bytes_per_sample": 3e5,
        "bubble_fraction": 0.141,
        "comm_stall_fraction": 0.12,
        "peak_memory_bytes_max": 3e6,
        "weight_versions_max": 1,
        "wall_time_s": 12.0,
        "best_top1": 0.957,
    },
    stages=({"index": 0, "num_layers": 53, "replicas": 4, "depth": 1, "forward_s": 7e-4, "weight_versions_max": 1},),
)
PIPEDREAM = replace(
    DP,
    name="quickstart-pipedream",
    mode="pipedream",
    plan="straight",
    metrics={**DP.metrics, "time_to_accuracy_s": 2.0},
)
BARE = replace(PIPEDREAM, name="quickstart-bare", outcome=COMPLETED, metrics={}, stages=({},))


def plain(width: int = 110) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_the_summary_tells_everything_a_run_came_to() -> None:
    to = plain()
    console.print_summary(DP, "stage 0  F0 B0", "pipebench ui", to)
    lines = written(to).splitlines()
    assert "quickstart-dp: reached top1 0.95 (top1 0.957) after 3 epochs" in lines
    facts = {line[2:18].strip(): line[20:].strip() for line in lines if line.startswith("  ")}
    assert facts["plan"] == "4 (dp, seed 0, virtual engine, virtual clock)"
    assert facts["durations"] == "roofline of V100"
    assert facts["time to accuracy"] == "6.00 s (5.50 s without evaluation)"
    assert facts["epochs"] == "3 to the target, 1.80 s each"
    assert facts["throughput"] == "2,222 samples/s, 128 samples per update"
    assert facts["sent per sample"] == (
        "300 kB (activation 100 kB, all-reduce 200 kB); 3.00 GB in all; buffers 1.00 kB in all"
    )
    assert facts["workers idle"] == "14.1% bubble, 12.0% waiting for communication"
    assert facts["memory"] == "3.00 MB at most on a worker, 1 weight versions at most"
    assert "  stage 0  F0 B0" in lines
    assert "  MLflow  pipebench ui" in lines
    assert not any(line.endswith(" ") for line in lines)


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


def test_a_note_stands_beside_its_number() -> None:
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
    assert "- dp: workers idle: times aren't known" in console.comparison_markdown([crowded, PIPEDREAM]).splitlines()
    assert RunResult.from_json(crowded.to_json()) == crowded


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


def test_nothing_is_needed_but_the_sentence() -> None:
    to = plain()
    console.print_summary(BARE, "", "", to)
    console.print_comparison([BARE], "", to)
    assert "quickstart-bare" in written(to)


def test_brackets_in_names_are_no_markup() -> None:
    to = plain()
    console.print_summary(replace(DP, name="a[bold]b", sentence="[/red]"), "[x]", "[y]", to)
    assert "a[bold]b: [/red]" in written(to)


def test_speed_ups_are_over_dp_of_the_same_seed() -> None:
    assert speed_up(PIPEDREAM, DP) == 3.0
    assert epoch_speed_up(PIPEDREAM, DP) == 1.0
    other = replace(DP, seed=1, metrics={**DP.metrics, "time_to_accuracy_s": 8.0})
    rows = comparison_rows([DP, other, replace(PIPEDREAM, seed=1), replace(PIPEDREAM, seed=2)])
    assert [row[3] for row in rows] == ["1.00x", "1.00x", "4.00x", "3.00x"]


def test_without_dp_there_is_no_speed_up() -> None:
    assert comparison_rows([PIPEDREAM])[0][3] == "-"


def test_a_missed_run_has_no_time_and_no_speed_up_but_epochs() -> None:
    missed = replace(PIPEDREAM, outcome=MISSED)
    row = comparison_rows([DP, missed])[1]
    assert row[:7] == ("pipedream", "straight", "missed", "-", "-", "1.80 s", "1.00x")
    assert comparison_rows([replace(DP, outcome=DIVERGED), PIPEDREAM])[1][3] == "-"


def test_a_comparison_fits_a_terminal_of_80_columns() -> None:
    to = plain(80)
    console.print_comparison([DP, PIPEDREAM], "", to)
    lines = [line.split() for line in written(to).splitlines()]
    assert ["dp", "4", "6.00", "s", "1.00x", "3", "1.80", "s", "1.00x", "300", "kB", "3.00", "MB", "14.1%"] in lines


def test_markdown_is_a_table_and_a_sentence_each() -> None:
    lines = console.comparison_markdown([DP, PIPEDREAM]).splitlines()
    assert lines[0].startswith("| run | plan | time to accuracy | vs dp |")
    assert lines[1].count("---") == lines[0].count("|") - 1
    assert lines[3].startswith("| pipedream | straight | 2.00 s | 3.00x |")
    assert lines[5] == "- quickstart-dp: reached top1 0.95 (top1 0.957) after 3 epochs"


def test_seeds_have_median_and_spread() -> None:
    results = [DP, replace(DP, seed=1, metrics={**DP.metrics, "time_to_accuracy_s": 8.0}), replace(DP, outcome=MISSED)]
    to = plain()
    console.print_seeds("quickstart-dp", results, summarise_seeds(results), to)
    assert "quickstart-dp: 3 seeds, 2 of 3 reached the target" in written(to)
    rows = [line.split() for line in written(to).splitlines()]
    assert ["time_to_accuracy_s", "7.00", "s", "7.00", "s", "1.41", "s", "6.00", "s", "8.00", "s"] in rows


def test_without_a_terminal_there_is_a_line_per_evaluation() -> None:
    to = plain()
    with RunProgress("dp", 1000, quiet=True, console=to) as progress:
        for samples in range(0, 500, 10):
            progress.update(samples, 0.001 * samples, 2.0, 0.5)
        progress.evaluation(Point(500, 0.6, {"train_loss": 0.25, "top1": 0.9}), 1.0)
    line = written(to)
    assert line.count("\n") == 1
    assert line.startswith("dp  epoch 1  train_loss 0.250  top1 90.0%  virtual time 600 ms  wall ")


def test_on_a_terminal_there_is_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr("pipebench.progress.time.monotonic", lambda: float(next(now_s)))
    to = Console(file=io.StringIO(), width=120, force_terminal=True, highlight=False, color_system=None)
    with RunProgress("dp", 1000, quiet=False, samples_per_epoch=500, console=to) as progress:
        progress.update(250, 0.3, 2.0, 0.5)
        progress.evaluation(Point(500, 0.6, {"train_loss": 0.25, "top1": 0.9}), 1.0)
        progress.update(750, 0.9, 0.125, 0.75)
    text = written(to)
    assert "epoch 0.5 of at most 2  loss 2.00" in text
    assert "epoch 1.5 of at most 2  loss 0.125  top1 90.0%" in text
    assert "virtual time 900 ms  pipeline 75.0% busy  wall" in text
    assert "epoch 1  train_loss 0.250" in text


def test_updates_are_drawn_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.progress.time.monotonic", lambda: 1.0)
    to = Console(file=io.StringIO(), width=120, force_terminal=True, highlight=False, color_system=None)
    with RunProgress("dp", 1000, quiet=False, console=to) as progress:
        for samples in range(1000):
            progress.update(samples, 0.0, 1.0, 0.0)
        drawn = written(to)
    assert "sample 0 of at most 1,000" in drawn
    assert "sample 1 of" not in drawn


def test_preparing_writes_nothing_without_a_terminal() -> None:
    to = plain()
    with preparing("dp", to) as on_progress:
        on_progress(1, 2)
    assert written(to) == ""


def test_preparing_on_a_terminal_takes_its_line_away() -> None:
    to = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with preparing("dp", to) as on_progress:
        on_progress(1, 2)
    assert written(to).endswith("\x1b[2K")


def test_standard_output_of_a_test_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert not console.is_terminal()
    console.print_comparison([DP, PIPEDREAM], "pipebench ui")
    assert "MLflow  pipebench ui" in capsys.readouterr().out
