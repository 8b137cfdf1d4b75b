"""Expressions of reports: values of cells over metrics of runs, and claims over cells.

Expressions are parsed with Python's `ast`, limited to the operations listed here, and evaluated here: no code is
executed. A measure's name stands for its cells in all rows. Arithmetic and comparisons apply row by row, to the rows
that both sides have; functions such as `min` reduce the rows to one value.
"""

import ast
import math
import operator
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pipebench.errors import PipebenchError, nearest

LONGEST = 1000  # characters
_LARGEST = sys.float_info.max  # constants have no sign; larger integers are no floats
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_OF_NUMBERS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "median": statistics.median,
    "mean": statistics.fmean,
    "sum": math.fsum,
}
_OF_TRUTHS: Mapping[str, Callable[[Sequence[float]], bool]] = {"all": all, "any": any}
_CORRELATION = "correlation"  # Pearson's, over the rows that have cells of both measures
FUNCTIONS = ("min", "max", "abs", "median", "mean", "sum", "count", "all", "any", _CORRELATION)
_ALLOWED = "numbers, names, + - * / ( ), comparisons, and, or, not"

Lookup = Callable[[str, str], "Value"]


class Cells(dict[str, float]):
    """Values by row."""


Value = float | Cells


class NoValueError(PipebenchError):
    """An expression has no value for these cells; the message says why."""


@dataclass(frozen=True)
class Expression:
    """A valid expression."""

    text: str
    tree: ast.expr = field(compare=False, repr=False)
    metrics: tuple[tuple[str, str], ...] = ()  # (run, metric) of all metrics that it reads, with measures expanded


@dataclass(frozen=True)
class _Kind:
    """The type of an expression's value."""

    is_truth: bool = False  # else a number
    is_several: bool = False  # whether it has a value per row


def value_expression(text: str, measures: Mapping[str, Expression]) -> Expression:
    """Parse the value of a cell: one number over `run.metric` and the `measures` defined above it.

    Raises:
        ValueError: it is invalid; the message is the end of a sentence.
    """
    tree = _Spelled(measures).visit(_parsed(text))

    def kind_of_leaf(name: str, inside: str) -> _Kind:
        if not inside:
            hint = nearest(name[:60], measures)
            raise ValueError(f"{name[:60]!r} is no measure above this one; metrics of runs are run.metric{hint}")
        return _Kind()

    if _kind(tree, kind_of_leaf) != _Kind():
        raise ValueError("gives yes or no, allowed is what gives a number")
    return Expression(text, tree, tuple(dict.fromkeys(_leaves(tree))))


def claim_expression(text: str, measures: Collection[str], rows: Collection[str]) -> Expression:
    """Parse a claim: a truth over measures of all rows, or of those that `measure["row"]` names (a name or a pattern).

    Raises:
        ValueError: it is invalid; the message is the end of a sentence.
    """
    expression, is_truth = _over_cells(text, measures, rows)
    if not is_truth:
        raise ValueError("gives a number, allowed is what gives yes or no, such as a comparison")
    return expression


def quoted_expression(text: str, measures: Collection[str], rows: Collection[str]) -> Expression:
    """Parse a number over the cells, as quoted in a text; raises like `claim_expression`."""
    expression, is_truth = _over_cells(text, measures, rows)
    if is_truth:
        raise ValueError("gives yes or no, allowed is what gives a number")
    return expression


def unit_of(expression: Expression, units: Mapping[str, str]) -> str:
    """Return the unit of an expression over measures with `units`; a quotient of equal units is `x`."""
    return _unit(expression.tree, units) or "none"


def evaluate(expression: Expression, lookup: Lookup) -> Value:
    """Evaluate an expression.

    Infinite values, such as the time to a target that was missed, are valid operands.

    Args:
        expression: of a cell or a claim.
        lookup: returns the value of (run, metric) in a cell's expression, and of (measure, row) in a claim's, where the
            row is a name, a pattern, or "" for all rows. Its exceptions pass through.

    Raises:
        NoValueError: it has no value, such as a quotient by 0 or inf / inf.
    """
    return _value(expression.tree, lookup)


def cells_of(expression: Expression) -> Iterator[tuple[str, str]]:
    """Yield (measure, row) of all cells that a claim reads; the row is a name, a pattern, or "" for all rows."""
    yield from _cells(expression.tree)


def explain(expression: Expression, lookup: Lookup) -> str:
    """Return what decided a claim: the sides of its comparisons with their values, and the rows that decide.

    Raises:
        NoValueError: as by `evaluate`.
    """
    return "; ".join(dict.fromkeys(_explained(expression.tree, lookup)))


def _over_cells(text: str, measures: Collection[str], rows: Collection[str]) -> tuple[Expression, bool]:
    """Parse an expression with one value over the cells; also return whether it is a truth."""
    tree = _parsed(text)

    def kind_of_leaf(name: str, inside: str) -> _Kind:
        if name not in measures:
            raise ValueError(
                f"unknown measure {name[:60]!r}, allowed are {', '.join(measures)}{nearest(name, measures)}"
            )
        if inside and not any(fnmatchcase(row, inside) for row in rows):
            raise ValueError(f"no row is named {inside[:60]!r}{nearest(inside[:60], rows)}")
        return _Kind(is_several=inside not in rows)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            raise ValueError(f'got {ast.unparse(node)[:60]}, it has to be over measures: measure or measure["row"]')
    kind = _kind(tree, kind_of_leaf)
    if kind.is_several:
        raise ValueError("is about several rows, needed is one answer: write min(...), all(...) or another function")
    return Expression(text, tree), kind.is_truth


def _unit(node: ast.expr, units: Mapping[str, str]) -> str | None:
    """Return the unit of a subexpression; None for a plain number."""
    leaf = _leaf(node)
    if leaf is not None:
        return units[leaf[0]]
    if isinstance(node, ast.Call):
        is_bare = isinstance(node.func, ast.Name) and node.func.id in ("count", _CORRELATION)
        return None if is_bare else _common([_unit(each, units) for each in node.args])
    found = [_unit(each, units) for each in _operands(node)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div) and None not in found:
        return "x" if isinstance(node.op, ast.Div) and found[0] == found[1] else "none"
    over = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and found[0] is None
    return "none" if over and found[1] is not None else _common(found)


def _common(units: Sequence[str | None]) -> str | None:
    """Return the unit that all share, ignoring plain numbers; `none` if units differ."""
    found = {unit for unit in units if unit is not None}
    if len(found) > 1:
        return "none"
    return next(iter(found), None)


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ValueError(f"has {len(text)} characters, allowed are {LONGEST}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply or holds a strange character"
        raise ValueError(f"got {text[:60]!r}, which is no expression: {reason}; allowed are {_ALLOWED}") from None


class _Spelled(ast.NodeTransformer):
    """Replaces names of measures by their expressions."""

    def __init__(self, measures: Mapping[str, Expression]) -> None:
        self._measures = measures

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self._measures.get(node.id)
        return node if found is None else found.tree

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:  # the name before the dot is a run's
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:  # the called name is a function's
        node.args = [self.visit(each) for each in node.args]
        return node


def _leaves(tree: ast.expr) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def _leaf(node: ast.expr) -> tuple[str, str] | None:
    """Return the two names of a leaf, `run.metric` or `measure["row"]`, or one name and ""; None if it is no leaf."""
    if isinstance(node, ast.Name):
        return node.id, ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id, node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
        return (node.value.id, node.slice.value) if isinstance(node.slice.value, str) else None
    return None


def _cells(node: ast.expr) -> Iterator[tuple[str, str]]:
    leaf = _leaf(node)
    if leaf is not None:
        yield leaf
        return
    for part in node.args if isinstance(node, ast.Call) else _operands(node):
        yield from _cells(part)


def _kind(node: ast.expr, kind_of_leaf: Callable[[str, str], _Kind]) -> _Kind:
    """Return the type of an expression's value; raises a ValueError for unsupported syntax."""
    leaf = _leaf(node)
    if leaf is not None:
        return kind_of_leaf(*leaf)
    if isinstance(node, ast.Call):
        return _kind_of_call(node, kind_of_leaf)
    parts = [_kind(each, kind_of_leaf) for each in _operands(node)]
    several = any(each.is_several for each in parts)
    wants_truth = isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
    for part, operand in zip(parts, _operands(node), strict=True):
        if part.is_truth != wants_truth:
            given, allowed = ("yes or no" if truth else "a number" for truth in (part.is_truth, wants_truth))
            raise ValueError(f"{_short(operand)} gives {given}, allowed in {_short(node)} is {allowed}")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_zero(node.right):
        raise ValueError(f"{_short(node)} divides by zero")
    return _Kind(is_truth=wants_truth or isinstance(node, ast.Compare), is_several=several)


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return a node's operands; raises a ValueError for unsupported syntax."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and number <= _LARGEST:
            return []
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            return [left, right]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            return [operand]
        case ast.BoolOp(values=values):
            return values
        case ast.Compare(left, ops, comparators) if all(type(op) in _COMPARISONS for op in ops):
            return [left, *comparators]
    raise ValueError(f"{_short(node)} isn't taken, allowed are {_ALLOWED} and {', '.join(FUNCTIONS)}")


def _kind_of_call(node: ast.Call, kind_of_leaf: Callable[[str, str], _Kind]) -> _Kind:
    name = node.func.id if isinstance(node.func, ast.Name) else _short(node.func)
    if name not in FUNCTIONS:
        raise ValueError(f"unknown function {name!r}, allowed are {', '.join(FUNCTIONS)}{nearest(name, FUNCTIONS)}")
    if node.keywords or not node.args or any(isinstance(each, ast.Starred) for each in node.args):
        raise ValueError(f"{_short(node)}: {name} takes values between commas")
    kinds = [_kind(each, kind_of_leaf) for each in node.args]
    if name == _CORRELATION:
        if kinds != [_Kind(is_several=True)] * 2:
            raise ValueError(f"{_short(node)}: {name} takes the cells of two measures")
        return _Kind()
    if len(kinds) > 1 and (name == "abs" or any(each.is_several for each in kinds)):
        raise ValueError(f"{_short(node)}: {name} takes one value, or several of single rows")
    wants_truth = name in _OF_TRUTHS
    if name != "count" and any(each.is_truth != wants_truth for each in kinds):
        raise ValueError(f"{_short(node)}: {name} takes {'answers' if wants_truth else 'numbers'}")
    return _Kind(is_truth=wants_truth, is_several=name == "abs" and kinds[0].is_several)


def _is_zero(node: ast.expr) -> bool:
    if any(_leaf(each) for each in ast.walk(node) if isinstance(each, ast.expr)):
        return False
    try:
        return _value(node, lambda *_: math.nan) == 0
    except NoValueError:
        return False


def _value(node: ast.expr, lookup: Lookup) -> Value:
    """Return the value of a subexpression, which `_kind` has checked."""
    leaf = _leaf(node)
    if leaf is not None:
        return lookup(*leaf)
    match node:
        case ast.Constant(value=value):
            return value  # type: ignore[return-value] # validated to be a number
        case ast.Call(func=ast.Name(id=name), args=args):
            return _called(name, [_value(each, lookup) for each in args])
        case ast.BinOp(left, op, right):
            return _each(_ARITHMETIC[type(op)], _value(left, lookup), _value(right, lookup))
        case ast.UnaryOp(op, operand):
            function = operator.not_ if isinstance(op, ast.Not) else operator.neg
            return _value(operand, lookup) if isinstance(op, ast.UAdd) else _each(function, _value(operand, lookup))
        case ast.BoolOp(op, values):
            return _joined(op, [_value(each, lookup) for each in values])
        case ast.Compare(left, ops, comparators):
            sides = [_value(each, lookup) for each in (left, *comparators)]
            pairs = zip(ops, sides, sides[1:], strict=False)
            return _joined(ast.And(), [_each(_COMPARISONS[type(op)], one, other) for op, one, other in pairs])
    raise AssertionError(ast.dump(node))  # validated


def _joined(op: ast.boolop, values: Sequence[Value]) -> Value:
    join = all if isinstance(op, ast.And) else any
    return _each(lambda *each: join(each), *values)


def _each(function: Callable[..., float], *values: Value) -> Value:
    """Apply a function to numbers or, if any value has several rows, row by row to the rows that all of them have."""
    several = [value for value in values if isinstance(value, Cells)]
    if not several:
        return _applied(function, values)
    rows = [row for row in several[0] if all(row in other for other in several)]
    if not rows:
        raise NoValueError("no row has all the cells it takes")
    return Cells({row: _applied(function, [v[row] if isinstance(v, Cells) else v for v in values]) for row in rows})


def _applied(function: Callable[..., float], values: Sequence[Any]) -> float:
    """Return the value of a function of numbers; infinite only if one of them is."""
    try:
        value = function(*values)
        is_valid = not math.isnan(value) and (math.isfinite(value) or any(map(math.isinf, values)))
    except ZeroDivisionError:
        raise NoValueError("it divides by zero") from None
    except (ValueError, OverflowError):  # inf - inf in `fsum`; integers larger than any float
        is_valid = False
    if not is_valid:
        raise NoValueError("it isn't finite")
    return value


def _called(name: str, values: Sequence[Value]) -> Value:
    first = values[0]
    if name == "abs":
        return _each(abs, first)
    if name == _CORRELATION:
        return _correlation(values)
    members = list(first.values()) if isinstance(first, Cells) else [v for v in values if not isinstance(v, Cells)]
    if name == "count":
        return sum(bool(each) if isinstance(each, bool) else 1 for each in members)
    function = {**_OF_NUMBERS, **_OF_TRUTHS}[name]
    return _applied(lambda *each: function(each), members)


def _correlation(measures: Sequence[Value]) -> float:
    one, other = (value if isinstance(value, Cells) else Cells() for value in measures)
    rows = [row for row in one if row in other]
    x, y = [one[row] for row in rows], [other[row] for row in rows]
    if len({*x}) < 2 or len({*y}) < 2:
        raise NoValueError("it takes two rows that differ")
    return _applied(lambda *_: statistics.correlation(x, y), [*x, *y])


def _explained(node: ast.expr, lookup: Lookup) -> Iterator[str]:
    """Yield the sides of comparisons with their values, and for `all` and `any` the rows that decide."""
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            if not isinstance(side, ast.Constant):
                yield f"{ast.unparse(side)} is {_shown(_value(side, lookup))}{_where(side, lookup)}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OF_TRUTHS:
        value = _value(node.args[0], lookup)
        if isinstance(value, Cells):
            holding, against = ([row for row in value if bool(value[row]) is held] for held in (True, False))
            named = f", not {', '.join(against)}" if node.func.id == "all" else f": {', '.join(holding)}"
            yield f"{len(holding)} of {len(value)} rows{named if against and holding else ''}"
    elif isinstance(node, ast.BoolOp | ast.UnaryOp):
        for part in _operands(node):
            yield from _explained(part, lookup)


def _where(node: ast.expr, lookup: Lookup) -> str:
    """Return the row that has the minimum or maximum, if the expression is one over rows."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        value = _value(node.args[0], lookup)
        if isinstance(value, Cells):
            return f" ({(min if node.func.id == 'min' else max)(value, key=lambda row: value[row])})"
    return ""


def _shown(value: Value) -> str:
    return f"{value:.4g}" if not isinstance(value, Cells) else ", ".join(f"{each:.4g}" for each in value.values())


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
