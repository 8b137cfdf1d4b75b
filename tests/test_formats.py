"""Numbers as people read them."""

import math

import pytest

from pipebench.formats import measure, num_bytes, number, percent, ratio, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (2.5e-9, "2.50 ns"),
        (3.2e-6, "3.20 us"),
        (0.00325, "3.25 ms"),
        (0.9999, "1.00 s"),
        (1.0, "1.00 s"),
        (99.9, "99.9 s"),
        (99.96, "1 min 40 s"),
        (3599.9, "1 h 00 min"),
        (3661.0, "1 h 01 min"),
        (200_000.0, "2 d 8 h"),
        (-120.0, "-2 min 00 s"),
        (math.inf, "inf s"),
        (None, "-"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (2.5e12, "2.50 TB"), (None, "-")],
)
def test_num_bytes(value: float | None, text: str) -> None:
    assert num_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.00"), (-0.5, "-0.500"), (1e-9, "1.00e-09"), (123456.0, "123,456"), (math.nan, "nan")]
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("final_top1", 0.951, "95.1%"),
        ("bubble_fraction", 0.25, "25.0%"),
        ("time_to_accuracy_s", 12.0, "12.0 s"),
        ("throughput_samples_per_s", 1234.0, "1,234"),
        ("comm_bytes_per_sample", 2e6, "2.00 MB"),
        ("train_loss", 0.1, "0.100"),
        ("top1", None, "-"),
    ],
)
def test_a_metric_is_written_as_its_name_asks_for(metric: str, value: float | None, text: str) -> None:
    assert measure(metric, value) == text


def test_shares_and_speed_ups() -> None:
    assert (percent(0.5), percent(None), ratio(2.0), ratio(None)) == ("50.0%", "-", "2.00x", "-")
