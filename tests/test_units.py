import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench.units import UnitError, parse_bandwidth, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16 GB", 16_000_000_000), ("12 GiB", 12 * 2**30), ("1.5kB", 1500), (4096, 4096), ("7", 7), ("2e3 B", 2000)],
)
def test_bytes(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("10 Gbit/s", 1.25e9), ("30 GB/s", 30e9), ("8bit/s", 1.0), (5e9, 5e9), ("1 MiB/s", 2.0**20)]
)
def test_bandwidth(text: object, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("5 us", 5e-6), ("1.5 ms", 1.5e-3), (0, 0.0), ("2 s", 2.0), ("3 ns", 3e-9)]
)
def test_duration(text: object, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 Gbps", r"got '10 Gbps', allowed is a bandwidth: a number, then one of .*did you mean '\w+/s'"),
        ("fast", "got 'fast', allowed is a bandwidth"),
        ("10 G bit/s", "got '10 G bit/s', allowed"),
        ("0 GB/s", "got '0 GB/s', allowed is a bandwidth of at least 1 B/s"),
        ("-1 GB/s", "of at least 1 B/s"),
        ("1e999 GB/s", "of at least 1 B/s"),
        (float("nan"), "got 'nan', allowed"),
        (True, "got 'True', allowed"),
        (None, "got 'None', allowed"),
    ],
)
def test_refused(text: object, message: str) -> None:
    with pytest.raises(UnitError, match=message):
        parse_bandwidth(text)


@given(st.text(max_size=30))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_bandwidth, parse_duration):
        with contextlib.suppress(UnitError):
            assert parse(text) >= 0
