import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench.units import UnitError, parse_bandwidth, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16 GB", 16_000_000_000), ("12 GiB", 12 * 2**30), ("1.5kB", 1500), (4096, 4096), ("7 B", 7), ("2e3 B", 2000)],
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
        ("10 Gbps", r"got '10 Gbps', allowed is a bandwidth: a number, then one of .*did you mean 'Gbit/s'"),
        ("fast", "got 'fast', allowed is a bandwidth"),
        ("10 G bit/s", "got '10 G bit/s', allowed"),
        ("0 GB/s", "got '0 GB/s', allowed is a bandwidth of at least 1 B/s"),
        ("-1 GB/s", "of at least 1 B/s"),
        ("1e999 GB/s", "of at least 1 B/s"),
        (float("nan"), "got nan, allowed"),
        (True, "got true, allowed"),
        (None, "got null, allowed"),
    ],
)
def test_refused(text: object, message: str) -> None:
    with pytest.raises(UnitError, match=message):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (parse_bandwidth, "25Gb/s", "Gbit/s"),
        (parse_bandwidth, "25 gbps", "Gbit/s"),
        (parse_bandwidth, "25 mbits/s", "Mbit/s"),
        (parse_bandwidth, "3 GBps", "GB/s"),
        (parse_bandwidth, "3 KB/s", "kB/s"),
        (parse_bandwidth, "3 GB", "GB/s"),
        (parse_bandwidth, "25 gb/s", None),
        (parse_bandwidth, "3 iB/s", None),
        (parse_bytes, "40Gb", None),
        (parse_bytes, "40 Gbit", None),
        (parse_bytes, "40 gb", "GB"),
        (parse_bytes, "40 gib", "GiB"),
        (parse_bytes, "40 Mbytes", "MB"),
        (parse_duration, "3 \N{MICRO SIGN}s", "us"),
        (parse_duration, "3 \N{GREEK SMALL LETTER MU}s", "us"),
        (parse_duration, "3 msec", "ms"),
        (parse_duration, "3 min", None),
    ],
)
def test_a_misspelt_unit_is_answered_with_the_same_quantity(
    parse: Callable[[object], float], text: str, meant: str | None
) -> None:
    """0.2.0: bits were answered with bytes, microseconds and minutes with seconds and milliseconds."""
    with pytest.raises(UnitError) as raised:
        parse(text)
    assert str(raised.value).partition("; ")[2] == (f"did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize(
    ("parse", "given", "problem"),
    [
        (parse_bandwidth, 10, "got 10, which is 10 B/s: write its unit, such as 10 Gbit/s"),
        (parse_bandwidth, "999.5", "got '999.5', which is 999.5 B/s: write its unit, such as 10 Gbit/s"),
        (parse_bytes, 16, "got 16, which is 16 B: write its unit, such as 16 GB"),
        (parse_duration, "10", "got '10', which is 10 s: write its unit, such as 5 us"),
        (parse_duration, 0.5, "got 0.5, which is 0.5 s: write its unit, such as 5 us"),
    ],
)
def test_an_implausible_number_without_a_unit_is_refused(
    parse: Callable[[object], float], given: object, problem: str
) -> None:
    """0.2.0: `--levels 8@10`, and a bandwidth of 10 in a cluster's file, were taken as 10 bytes/s."""
    with pytest.raises(UnitError) as raised:
        parse(given)
    assert str(raised.value) == problem
    assert parse(f"{given} {'B' if parse is parse_bytes else 'kB/s' if parse is parse_bandwidth else 'us'}") > 0


@given(st.text(max_size=30))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_bandwidth, parse_duration):
        with contextlib.suppress(UnitError):
            assert parse(text) >= 0
