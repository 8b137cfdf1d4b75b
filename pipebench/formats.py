"""Numbers as text, in one format everywhere: seconds, bytes, shares, speed-ups. Long names and lists, shortened."""

import math
import re
from collections.abc import Sequence

from pipebench.errors import printable

UNKNOWN = "-"
_SMALL_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SPELLED_WITH_AN = re.compile(r"[AEFHILMNORSX](?=[A-Z0-9]|$)|[AEIOaeio8]")
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# Metrics that are fractions from 0 to 1, shown as per cent.
_SHARES = ("top1", "top5", "accuracy", "fraction", "error")


def number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, without exponent below a million.

    >>> number(0.012345), number(1234.5), number(float("nan"))
    ('0.0123', '1,234', 'nan')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    # Rounded first: 9.996 is 10.0, which has one more digit before the point.
    magnitude = math.floor(math.log10(abs(_rounded(value, digits))))
    if not -5 <= magnitude < 15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def _rounded(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits - 1}e}")


def seconds(value: float | None) -> str:
    """Return a duration in a suitable unit.

    >>> seconds(0.00325), seconds(42.0), seconds(125.4), seconds(4000), seconds(None)
    ('3.25 ms', '42.0 s', '2 min 05 s', '1 h 07 min', '-')
    """
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return f"{value:g} s"
    if abs(value) >= 99.95:
        return _long_seconds(value)
    size_s = _rounded(abs(value))
    unit, scale = next((entry for entry in _SMALL_UNITS if size_s >= entry[1]), _SMALL_UNITS[-1])
    return "0 s" if value == 0 else f"{number(value / scale)} {unit}"


def _long_seconds(value: float) -> str:
    sign, rest = ("-" if value < 0 else ""), abs(value)
    if rest < 3599.5:
        return "{}{} min {:02d} s".format(sign, *divmod(round(rest), 60))
    minutes = round(rest / 60)
    if minutes < 48 * 60:
        return "{}{} h {:02d} min".format(sign, *divmod(minutes, 60))
    return "{}{} d {} h".format(sign, *divmod(round(rest / 3600), 24))


def a_or_an(device: str) -> str:
    """Return a device's name after `a` or `an`, as its first letter or digit is pronounced.

    >>> a_or_an("A100"), a_or_an("H100"), a_or_an("V100"), a_or_an("2080Ti"), a_or_an("RTX 2080"), a_or_an("Hopper")
    ('an A100', 'an H100', 'a V100', 'a 2080Ti', 'an RTX 2080', 'a Hopper')
    """
    return f"{'an' if _SPELLED_WITH_AN.match(device) else 'a'} {device}"


def num_epochs(count: float) -> str:
    """Return a number of epochs.

    >>> num_epochs(1), num_epochs(2.5)
    ('1 epoch', '2.5 epochs')
    """
    return f"{count:g} epoch{'' if count == 1 else 's'}"


def num_samples(count: int) -> str:
    """Return a number of samples.

    >>> num_samples(1), num_samples(64)
    ('1 sample', '64 samples')
    """
    return f"{count} sample{'' if count == 1 else 's'}"


def num_bytes(value: float | None) -> str:
    """Return a count of bytes in decimal units.

    >>> num_bytes(999), num_bytes(12_345_678), num_bytes(None)
    ('999 B', '12.3 MB', '-')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN if value is None else f"{value:g} B"
    amount, unit_index = value, 0
    while abs(amount) >= 999.5 and unit_index < len(_BYTE_UNITS) - 1:
        amount, unit_index = amount / 1000, unit_index + 1
    digits = f"{amount:.0f}" if unit_index == 0 and amount == int(amount) else number(amount)
    return f"{digits} {_BYTE_UNITS[unit_index]}"


def percent(fraction: float | None) -> str:
    """Return a fraction as per cent.

    >>> percent(0.9512), percent(1.0), percent(None)
    ('95.1%', '100.0%', '-')
    """
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f}%"


def ratio(value: float | None) -> str:
    """Return a speed-up with two decimals.

    >>> ratio(2.9612), ratio(0.1123), ratio(1_997_147.131), ratio(None)
    ('2.96x', '0.11x', '1,997,147.13x', '-')
    """
    return UNKNOWN if value is None else f"{value:,.2f}x"


def listed(texts: Sequence[str], most: int) -> str:
    """Return the first `most` texts, and how many more there are.

    >>> listed(["a", "b"], 2), listed(["a", "b", "c", "d"], 2)
    ('a, b', 'a, b and 2 more')
    """
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction from 0 to 1, shown as per cent."""
    return any(metric == share or metric.endswith(f"_{share}") for share in _SHARES)


def measure(metric: str, value: float | None) -> str:
    """Return a metric's value in the unit and format that its name implies.

    >>> measure("top1", 0.951), measure("epoch_time_s", 0.5), measure("comm_bytes_total", 2e6), measure("loss", 0.25)
    ('95.1%', '500 ms', '2.00 MB', '0.250')
    """
    if value is None:
        return UNKNOWN
    if metric.endswith("_s") and not metric.endswith("_per_s"):
        return seconds(value)
    if "bytes" in metric.split("_"):
        return num_bytes(value)
    return percent(value) if is_share(metric) else number(value)


def shortened(text: str, width: int) -> str:
    """Return a name, cut to `width` characters if it is longer.

    >>> shortened("Conv2d(3, 64, kernel_size=(3, 3))", 12), shortened("ReLU", 12)
    ('Conv2d(3, ..', 'ReLU')
    """
    plain = printable(text)
    return plain if len(plain) <= width else f"{plain[: width - 2]}.."
