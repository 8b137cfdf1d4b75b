"""JSON of dataclasses: read back exactly, or refused in one sentence that says where, what and what instead."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from pipebench.typed_json import Count, Finite, JsonError, Number, Samples, Seconds, Within, read, shown, write


@dataclass(frozen=True)
class Inner:
    """Something inside."""

    name: str
    took_s: Seconds = 0.0


@dataclass(frozen=True)
class Outer:
    """A field of every kind."""

    count: Count
    inner: tuple[Inner, ...]
    by_size: Mapping[Samples, tuple[Inner, ...]] = field(default_factory=dict)
    metrics: Mapping[str, Number] = field(default_factory=dict)
    pair: tuple[str, Count] | None = None
    is_whole: bool = True
    offset: Finite = 0.0
    share: Annotated[float, Within(0, 1, "a fraction")] = 0.5
    anything: Any = None


FULL = Outer(
    3, (Inner("a", 1 / 3), Inner("\u00e9\n")), {4: (Inner("b"),), 8: ()}, {"loss": math.inf, "number": 3},
    ("x", 2**60), False, -1e308, 1.0, {"deep": [None, {"er": 1.5}]},
)  # fmt: skip


def test_written_objects_are_read_back_exactly() -> None:
    assert read(Outer, write(FULL)) == FULL
    assert write(read(Outer, write(FULL).encode())) == write(FULL)
    assert type(read(Outer, write(FULL)).metrics["number"]) is int
    assert math.isnan(read(Outer, '{"count": 1, "inner": [], "metrics": {"loss": NaN}}').metrics["loss"])


def test_a_field_with_a_default_may_be_left_out() -> None:
    assert read(Outer, {"count": 1, "inner": [{"name": "a"}]}) == Outer(1, (Inner("a"),))


HUGE = "1" + "0" * 400
FAULTS = {
    "": "isn't JSON: EOF while parsing a value",
    "\xff": "isn't JSON: ",
    "[" * 100_000: "isn't JSON: recursion limit exceeded",
    '{"count": 1' + "0" * 5000: "isn't JSON: number out of range",
    '{"count": "\\ud800"}': "isn't JSON: ",
    "[]": "got a list, allowed is an object",
    "{}": "'count' is missing",
    '{"cuont": 1}': "unknown key 'cuont'; did you mean 'count'?",
    '{"count": 1, "inner": [{"name": "a", "x": 1}]}': "inner[0]: unknown key 'x'",
    '{"count": 1, "inner": [{"name": 1}]}': "inner[0].name: got 1, allowed is text",
    '{"count": 1, "inner": {}}': "inner: got an object, allowed is a list",
    '{"count": true, "inner": []}': "count: got true, allowed is a whole number from 0 on",
    '{"count": "3", "inner": []}': "count: got '3', allowed is a whole number from 0 on",
    '{"count": 1.0, "inner": []}': "count: got 1.0, allowed is a whole number from 0 on",
    '{"count": -1, "inner": []}': "count: got -1, allowed is a whole number from 0 on",
    '{"count": null, "inner": []}': "count: got null, allowed is a whole number from 0 on",
    f'{{"count": {HUGE}, "inner": []}}': "count: got a huge number, allowed is a whole number from 0 on",
    '{"count": 1, "inner": [{"name": "a", "took_s": NaN}]}': "inner[0].took_s: got nan, allowed is seconds from 0 to",
    '{"count": 1, "inner": [{"name": "a", "took_s": -1}]}': "inner[0].took_s: got -1, allowed is seconds from 0 to",
    f'{{"count": 1, "inner": [], "offset": {HUGE}}}': "offset: got a huge number, allowed is a finite number",
    '{"count": 1, "inner": [], "offset": -Infinity}': "offset: got -inf, allowed is a finite number",
    '{"count": 1, "inner": [], "share": 1.5}': "share: got 1.5, allowed is a fraction",
    '{"count": 1, "inner": [], "is_whole": 1}': "is_whole: got 1, allowed is true or false",
    '{"count": 1, "inner": [], "metrics": {"a.b": "x"}}': "metrics['a.b']: got 'x', allowed is a number",
    '{"count": 1, "inner": [], "metrics": {"a": true}}': "metrics.a: got true, allowed is a number",
    '{"count": 1, "inner": [], "by_size": {"x": []}}': "by_size: got 'x', allowed is numbers of samples as keys",
    '{"count": 1, "inner": [], "by_size": {"04": []}}': "by_size: got '04', allowed is numbers of samples as keys",
    '{"count": 1, "inner": [], "by_size": {"4": [1]}}': "by_size[4][0]: got 1, allowed is an object",
    '{"count": 1, "inner": [], "pair": ["a"]}': "pair: item 1 is missing",
    '{"count": 1, "inner": [], "pair": ["a", 1, 2]}': "pair: has 3 items, allowed is 2",
}


@pytest.mark.parametrize("text", FAULTS, ids=lambda text: text[:40])
def test_a_fault_is_one_sentence(text: str) -> None:
    with pytest.raises(JsonError) as refused:
        read(Outer, text.encode("latin-1"))
    assert str(refused.value).startswith(FAULTS[text])
    assert "\n" not in str(refused.value)


def test_a_fault_names_the_position_in_its_parent() -> None:
    with pytest.raises(JsonError, match=r"^progress\.count: got -1"):
        read(Outer, {"count": -1, "inner": []}, "progress")
    with pytest.raises(JsonError, match=r"^progress: unknown key 'more'$"):
        read(Outer, {"count": 1, "inner": [], "more": 1}, "progress")


def test_values_in_faults_are_short_and_on_one_line() -> None:
    assert shown("a\n" * 100) == ascii("a\n" * 100)[:57] + "..."
    assert [shown([1]), shown({}), shown(10**5000)] == ["a list", "an object", "a huge number"]
