"""The simulator's prediction beside a run's measurements."""

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.simulate.steady import simulate_segment
from pipebench.train.periods import Periods
from pipebench.train.prediction import compare, prediction_line, prediction_markdown
from pipebench.train.simulated import predicted_metrics
from tests.engine.test_modes import images
from tests.models import ConvNet
from tests.support import Blobs, Mlp, make_engine, make_setup

PREDICTED = {
    "epoch_time_s": 1.0,
    "bubble_fraction": 0.25,
    "comm_bytes_per_sample": 2000.0,
    "comm_bytes_per_sample_gradient": 0.0,
    "samples_per_update": 32.0,
}
MEASURED = {
    "epoch_time_s": 1.25,
    "bubble_fraction": 0.2,
    "comm_bytes_per_sample": 2000.0,
    "comm_bytes_per_sample_gradient": 0.0,
    "throughput_samples_per_s": 100.0,
    "samples_per_update": 32.0,
}


def test_a_run_slower_than_predicted_has_an_error_above_zero() -> None:
    assert compare(MEASURED, PREDICTED) == {
        "predicted_epoch_time_s": 1.0,
        "predicted_bubble_fraction": 0.25,
        "predicted_comm_bytes_per_sample": 2000.0,
        "predicted_comm_bytes_per_sample_gradient": 0.0,
        "prediction_error": pytest.approx(0.25),
    }


def test_without_a_measured_epoch_there_is_no_error() -> None:
    metrics = compare({}, PREDICTED)
    assert "prediction_error" not in metrics
    assert metrics["predicted_epoch_time_s"] == 1.0
    assert prediction_line(metrics) == ""


def test_the_table_has_measured_predicted_and_difference() -> None:
    assert prediction_markdown({**MEASURED, **compare(MEASURED, PREDICTED)}).splitlines() == [
        "| | measured | predicted | difference |",
        "| --- | ---: | ---: | ---: |",
        "| comm_bytes_per_sample | 2.00 kB | 2.00 kB | +0.0% |",
        "| bubble_fraction | 20.0% | 25.0% | -5.0 points |",
        "| epoch_time_s | 1.25 s | 1.00 s | +25.0% |",
        "| throughput_samples_per_s | 100 | - |  |",
        "| comm_bytes_per_sample_gradient | 0 B | 0 B | none |",
    ]


def test_a_note_is_printed_below_the_table() -> None:
    assert prediction_markdown(MEASURED, "cores are shared").splitlines()[-2:] == ["", "cores are shared"]


def test_the_line_says_both_epoch_times() -> None:
    line = prediction_line({**MEASURED, **compare(MEASURED, PREDICTED)})
    assert line == "epoch 1.00 s predicted, 1.25 s measured (+25.0%)"


def test_every_drain_within_an_epoch_takes_its_time() -> None:
    setup = make_setup(Mlp(), ([4], [1, 1]), dataset=Blobs(num_train=40, num_eval=4))  # minibatches of 4
    halves, whole = (predicted_metrics(setup, Periods(20, period, 20)) for period in (5, 10))
    assert halves["epoch_time_s"] == halves["total_time_s"] == pytest.approx(2 * simulate_segment(setup, 5).end_s)
    assert whole["epoch_time_s"] == whole["total_time_s"] < halves["epoch_time_s"]  # one drain instead of two
    assert whole["comm_bytes_per_sample"] == halves["comm_bytes_per_sample"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("evaluation", [3, 4, 10, 20, 37])
@pytest.mark.parametrize("checkpoint", [10, 7])
@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
def test_predicted_times_of_segments_equal_those_on_the_virtual_clock(
    evaluation: int, checkpoint: int, replicas: list[int]
) -> None:
    """Ten minibatches an epoch, the last of one sample, which is at the end of segments and in the middle of others."""
    setup = make_setup(Mlp(), ([4], replicas), dataset=Blobs(num_train=37, num_eval=4))
    periods, engine, done = Periods(40, evaluation, checkpoint), make_engine(setup), 0
    while done < 10:
        done += engine.train(done, periods.next_drain(done) - done)
    predicted, samples = predicted_metrics(setup, periods), setup.sampler.samples_before(done)
    assert predicted["total_time_s"] == pytest.approx(engine.clock_s, rel=1e-12)
    assert predicted["epoch_time_s"] == pytest.approx(engine.clock_s * 37 / samples)
    assert predicted["comm_bytes_total"] == sum(engine.num_bytes.values())


@pytest.mark.parametrize("replicas", [[3, 1], [2, 2], [1, 3]])
def test_the_predicted_time_of_an_epoch_includes_averaging_of_statistics(replicas: list[int]) -> None:
    """BatchNorm in both stages, whose replicas average at the drain what takes them a while on so slow links."""
    cluster = Cluster("slow", "unit", None, (Level("server", 4, 40.0, 1e-3),))
    setup = make_setup(ConvNet(), ([4], replicas), dataset=images(), cluster=cluster, sizes=(2, 4))
    predicted, engine = predicted_metrics(setup, Periods(12, 12, 12)), make_engine(setup)
    assert engine.train(0, 12) == 12
    assert predicted["epoch_time_s"] == pytest.approx(engine.clock_s, rel=1e-12)
    assert predicted["total_time_s"] > simulate_segment(setup, 12).end_s
    for kind in ("buffers", "all_reduce", "activation", "gradient"):
        sent = sum(num for (each, _), num in engine.num_bytes.items() if each == kind.replace("_", "-"))
        assert predicted[f"comm_bytes_{kind}"] == sent
