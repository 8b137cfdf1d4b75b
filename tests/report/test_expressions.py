"""Expressions have the value that Python gives them; syntax that isn't listed is refused and never executed."""

import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench.report.expressions import (
    Cells,
    NoValueError,
    Value,
    claim_expression,
    evaluate,
    explain,
    quoted_expression,
    unit_of,
    value_expression,
)

RUNS = {"a.x": 2.0, "a.y": 0.5, "b.x": -3.0}
ROWS = {"speedup": Cells({"vgg-a": 5.0, "vgg-b": 2.0, "gnmt": 0.8}), "bytes": Cells({"vgg-a": 1.0, "gnmt": 4.0})}
# What Python calls by these names takes other arguments than ours do; the meaning is stated here a second time.
MEANINGS: dict[str, Callable[..., float]] = {
    "min": lambda *v: min(v),
    "max": lambda *v: max(v),
    "abs": abs,
    "median": lambda *v: statistics.median(v),
    "mean": lambda *v: math.fsum(v) / len(v),
    "sum": lambda *v: math.fsum(v),
    "count": lambda *v: len(v),
}


def of_runs(run: str, metric: str) -> Value:
    return RUNS[f"{run}.{metric}"]


def of_rows(measure: str, row: str) -> Value:
    return ROWS[measure][row] if row in ROWS[measure] else ROWS[measure]


numbers = st.one_of(st.sampled_from([*RUNS]), st.integers(0, 9).map(str), st.floats(0.01, 9).map(repr))
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda text: f"-{text}"),
        st.tuples(st.sampled_from([*MEANINGS]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda t: f"{t[0]}({', '.join(t[1][:1] if t[0] == 'abs' else t[1])})"
        ),
    ),
    max_leaves=12,
)


@given(expressions)
def test_a_cell_has_python_s_value_of_its_expression(text: str) -> None:
    class Run:
        def __init__(self, **metrics: float) -> None:
            self.__dict__.update(metrics)

    names = {**MEANINGS, "a": Run(x=2.0, y=0.5), "b": Run(x=-3.0), "__builtins__": {}}
    try:
        wanted = eval(text, names)  # of a text that was made here
    except (ZeroDivisionError, OverflowError):
        wanted = math.nan
    if math.isfinite(wanted):
        assert evaluate(value_expression(text, {}), of_runs) == pytest.approx(wanted, rel=1e-12)
    else:
        with pytest.raises((NoValueError, ValueError), match=r"divides by zero|isn't finite"):
            evaluate(value_expression(text, {}), of_runs)


comparisons = st.recursive(
    st.tuples(numbers, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), numbers).map(" ".join),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})"),
        inner.map(lambda text: f"(not {text})"),
    ),
    max_leaves=6,
)


@given(comparisons)
def test_a_claim_has_python_s_truth_value(text: str) -> None:
    text = text.replace("a.x", 'speedup["vgg-a"]').replace("a.y", 'speedup["vgg-b"]').replace("b.x", 'speedup["gnmt"]')
    wanted = eval(text, {"speedup": dict(ROWS["speedup"]), "__builtins__": {}})  # of a text that was made here
    assert evaluate(claim_expression(text, [*ROWS], [*ROWS["speedup"]]), of_rows) == wanted


@pytest.mark.parametrize(
    ("text", "wanted", "reason"),
    [
        ("min(speedup) >= 1", False, "min(speedup) is 0.8 (gnmt)"),
        ("max(speedup) > 4", True, "max(speedup) is 5 (vgg-a)"),
        ("all(speedup >= 1)", False, "2 of 3 rows, not gnmt"),
        ("any(speedup < 1)", True, "1 of 3 rows: gnmt"),
        ("count(speedup > 1) == 2", True, "count(speedup > 1) is 2"),
        ("count(speedup) == 3 and median(speedup) == 2", True, "count(speedup) is 3; median(speedup) is 2"),
        ("all(speedup > bytes)", False, "1 of 2 rows, not gnmt"),  # of the two rows that have both
        ("sum(abs(speedup - 1)) < 6", True, "sum(abs(speedup - 1)) is 5.2"),
        ("1 < max(speedup) <= 5", True, "max(speedup) is 5 (vgg-a)"),
        ("not all(1 / speedup > 1)", True, "1 of 3 rows, not vgg-a, vgg-b"),
        ("correlation(speedup, 1 - speedup) < 0", True, "correlation(speedup, 1 - speedup) is -1"),
        ("correlation(speedup, bytes) > 0", False, "correlation(speedup, bytes) is -1"),  # of the two that have both
        (
            "correlation(speedup, speedup * speedup) > 0.98",  # 56.448 / root(9.36 x 348.5664)
            True,
            "correlation(speedup, speedup * speedup) is 0.9883",
        ),
    ],
)
def test_claims_over_rows(text: str, wanted: bool, reason: str) -> None:
    claim = claim_expression(text, [*ROWS], [*ROWS["speedup"]])
    assert evaluate(claim, of_rows) == wanted
    assert explain(claim, of_rows) == reason


def test_an_expression_of_a_measure_reads_the_measure_s_runs() -> None:
    ratio = value_expression("a.x / b.x", {})
    twice = value_expression("2 * ratio + abs(a.y)", {"ratio": ratio})
    assert {*twice.metrics} == {("a", "x"), ("a", "y"), ("b", "x")}
    assert evaluate(twice, of_runs) == pytest.approx(2 * (2 / -3) + 0.5)


VALUES = [
    ("", "is no expression"),
    ("a.x +", "is no expression: invalid syntax"),
    ("a.x / 0", "a.x / 0 divides by zero"),
    ("a.x / (2 - 2)", "divides by zero"),
    ("speed", "'speed' is no measure above this one; metrics of runs are run.metric; did you mean 'speedup'"),
    ("a.x > 1", "gives yes or no, allowed is what gives a number"),
    ("1 + (a.x > 1)", "a.x > 1 gives yes or no, allowed in 1 \\+ \\(a.x > 1\\) is a number"),
    ("a.x ** 2", "isn't taken, allowed are numbers"),
    ("a.x if 1 else 2", "isn't taken"),
    ("a.b.c", "isn't taken"),
    ("a.x[0]", "isn't taken"),
    ("True", "True isn't taken"),
    ("1e999", "isn't taken"),
    (f"a.x * 1{'0' * 400}", "isn't taken"),
    ("'text'", "isn't taken"),
    ("[a.x]", "isn't taken"),
    ("lambda: 1", "isn't taken"),
    ("__import__('os').system('true')", "unknown function"),
    ("open('x')", "unknown function 'open', allowed are min, max"),
    ("mim(a.x)", "unknown function 'mim', .*did you mean 'min'"),
    ("min()", "min takes values between commas"),
    ("min(*a.x)", "min takes values between commas"),
    ("min(a.x, key=abs)", "min takes values between commas"),
    ("abs(a.x, a.y)", "abs takes one value"),
    ("correlation(a.x, a.y)", "correlation takes the cells of two measures"),
    ("all(a.x)", "all takes answers"),
    ("min(a.x > 1)", "min takes numbers"),
    ("(" * 300 + "1" + ")" * 300, "is no expression"),
    ("1 + " * 300 + "1", "has 1201 characters"),
]


@pytest.mark.parametrize(("text", "message"), VALUES)
def test_expressions_that_no_cell_can_have(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_expression(text, {"speedup": value_expression("a.x", {})})


CLAIMS = [
    ("speedup >= 1", "is about several rows, needed is one answer: write min"),
    ("min(speedup)", "gives a number, allowed is what gives yes or no"),
    ("min(speed) > 1", "unknown measure 'speed', allowed are speedup, bytes; did you mean 'speedup'"),
    ("dp.epoch_time_s > 1", r"got dp.epoch_time_s, it has to be over measures"),
    ('speedup["vgg"] > 1', "no row is named 'vgg'; did you mean 'vgg-"),
    ("speedup[0] > 1", "isn't taken"),
    ("min(speedup, bytes) > 1", "min takes one value, or several of single rows"),
    ("correlation(speedup) > 1", "correlation takes the cells of two measures"),
    ("correlation(speedup, 1) > 1", "correlation takes the cells of two measures"),
    ("correlation(speedup > 1, bytes) > 1", "correlation takes the cells of two measures"),
    ("1 and min(speedup) > 1", "1 gives a number, allowed in 1 and min"),
    ("not min(speedup)", "gives a number, allowed in not min"),
]


@pytest.mark.parametrize(("text", "message"), CLAIMS)
def test_expressions_that_no_claim_can_have(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        claim_expression(text, [*ROWS], [*ROWS["speedup"]])


@pytest.mark.parametrize(
    ("text", "wanted", "unit"),
    [
        ("max(speedup)", 5.0, "x"),
        ("mean(speedup)", 2.6, "x"),
        ("mean(speedup) - 1", 1.6, "x"),
        ('bytes["gnmt"] / bytes["vgg-a"]', 4.0, "x"),
        ('speedup["gnmt"] / bytes["gnmt"]', 0.2, "none"),
        ('speedup["gnmt"] * bytes["gnmt"]', 3.2, "none"),
        ('2 * bytes["gnmt"] / 4', 2.0, "bytes"),
        ('1 / bytes["gnmt"]', 0.25, "none"),
        ("sum(bytes) / count(bytes)", 2.5, "bytes"),
        ("-min(bytes)", -1.0, "bytes"),
        ("count(speedup > 1)", 2.0, "none"),
        ("correlation(bytes, bytes)", 1.0, "none"),
        ('speedup["gnmt"] + bytes["gnmt"]', 4.8, "none"),
    ],
)
def test_a_quoted_value_has_its_measure_s_unit(text: str, wanted: float, unit: str) -> None:
    quoted = quoted_expression(text, [*ROWS], [*ROWS["speedup"]])
    assert evaluate(quoted, of_rows) == pytest.approx(wanted)
    assert unit_of(quoted, {"speedup": "x", "bytes": "bytes"}) == unit


@pytest.mark.parametrize("cells", [Cells(), Cells({"gnmt": 1.0}), Cells({"vgg-a": 1.0, "gnmt": 1.0})])
def test_constant_values_have_no_correlation(cells: Cells) -> None:
    claim = claim_expression("correlation(speedup, bytes) > 0", [*ROWS], [*ROWS["speedup"]])
    with pytest.raises(NoValueError, match="it takes two rows that differ"):
        evaluate(claim, lambda measure, row: cells if measure == "bytes" else ROWS["speedup"])


def test_a_text_quotes_no_answers() -> None:
    with pytest.raises(ValueError, match="gives yes or no, allowed is what gives a number"):
        quoted_expression("min(speedup) > 1", [*ROWS], [*ROWS["speedup"]])


@pytest.mark.parametrize(
    "text",
    [
        "sum(c.x - a.x, a.x - c.x)",
        "mean(c.x - a.x, a.x - c.x)",
        "sum(1e308, 1e308, a.x)",
        f"a.x * (1{'0' * 300} * 1{'0' * 300})",
    ],
)
def test_a_result_that_is_not_finite_is_no_value(text: str) -> None:
    """0.2.0 ended with the error of the function, `-inf + inf in fsum`, where runs missed their target."""
    with pytest.raises(NoValueError, match="it isn't finite"):
        evaluate(value_expression(text, {}), lambda run, metric: math.inf if run == "c" else of_runs(run, metric))


def test_infinite_values_have_no_correlation() -> None:
    claim = claim_expression("correlation(a, b) > 0", ["a", "b"], ["one", "two"])
    cells = {"a": Cells(one=math.inf, two=1.0), "b": Cells(one=1.0, two=2.0)}
    with pytest.raises(NoValueError, match="it isn't finite"):
        evaluate(claim, lambda measure, row: cells[measure])
