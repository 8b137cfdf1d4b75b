"""Mutations of Python source: changes of one operator or number, where they are and the source that they make.

Only expressions inside functions are mutated: it can't be known which test runs a module's top level. Messages of
errors (below `raise`), annotations and f-strings are left out, since they decide no behaviour.
"""

import ast
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"),
}  # fmt: skip
_LOGIC = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


@dataclass(frozen=True)
class Mutation:
    """A change of one place of a file. Positions are bytes of the source."""

    line: int  # of the expression, counted from 1
    start: int  # first byte that is replaced
    stop: int  # byte after the last one that is replaced
    new: str  # the replacement
    node_start: int  # first byte of the expression around it, which is executed if and only if the change is
    node_stop: int  # byte after that expression

    def applied(self, source: bytes) -> bytes:
        """Return the source with this change."""
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def words(self, source: bytes) -> str:
        """Return the changed line before and after, as Markdown."""
        return f"`{_line_at(source, self.start)}` -> `{_line_at(self.applied(source), self.start)}`"


def mutations(source: bytes) -> list[Mutation]:
    """Return all mutations of a module, in the order of the source."""
    places = _Places(source)
    found = {change for node in _expressions(ast.parse(source)) for change in _changes(node, places)}
    return sorted(found, key=lambda it: (it.start, it.stop))


def probed(source: bytes, numbered: Iterable[tuple[int, Mutation]], call: str) -> bytes:
    """Return the source in which the expression of every numbered mutation first calls `call`(number).

    `call` is the source of a function that returns None: `(call(number) or (expression))` has the expression's value.
    """
    insertions = []
    for number, mutation in numbered:
        size = mutation.node_stop - mutation.node_start
        # Of expressions that begin at one place, the larger opens first; of those that end at one, it closes last.
        insertions.append((mutation.node_start, 1, -size, number, f"({call}({number}) or (".encode()))
        insertions.append((mutation.node_stop, 0, size, -number, b"))"))
    for place, *_, text in sorted(insertions, reverse=True):
        source = source[:place] + text + source[place:]
    return source


def _expressions(tree: ast.AST, inside: bool = False) -> Iterator[ast.expr]:
    """Yield the expressions inside functions that may be mutated; the module's docstring says which are left out."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(tree, ast.Call):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.JoinedStr | ast.pattern):
                continue
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if inside and isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.Constant):
                yield node
            yield from _expressions(node, inside or function)


class _Places:
    """Positions of expressions in a source, in bytes; the syntax tree has lines and columns."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def between(self, first: ast.expr, second: ast.expr, operator: str) -> tuple[int, int]:
        """Return the span of the operator between two operands, without parentheses and blanks."""
        after, before = self.span(first)[1], self.span(second)[0]
        start = self.source.index(operator.encode(), after, before)
        return start, start + len(operator)


def _changes(node: ast.expr, places: _Places) -> Iterator[Mutation]:
    """Yield the mutations of one expression, without those of its operands."""
    around = places.span(node)
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for first, kind, second in zip([left, *others], ops, others, strict=False):
                old, new = _COMPARISONS[type(kind)]
                yield Mutation(node.lineno, *places.between(first, second, old), new, *around)
        case ast.BoolOp(op=logic, values=values):
            old, new = _LOGIC[type(logic)]
            for former, latter in itertools.pairwise(values):
                yield Mutation(node.lineno, *places.between(former, latter, old), new, *around)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            old, new = _ARITHMETIC[type(sign)]
            yield Mutation(node.lineno, *places.between(left, right, old), new, *around)
        case ast.UnaryOp(op=ast.Not()):
            yield Mutation(node.lineno, around[0], around[0] + len("not"), "", *around)
        case ast.Constant(value=bool() as truth):
            yield Mutation(node.lineno, *around, str(not truth), *around)
        case ast.Constant(value=int() | float()):
            # Adding 1 changes every number, by more than a test's tolerance.
            text = places.source[around[0] : around[1]].decode()
            yield Mutation(node.lineno, *around, f"({text} + 1)", *around)


def _line_at(source: bytes, place: int) -> str:
    return source[source.rfind(b"\n", 0, place) + 1 :].split(b"\n", 1)[0].decode().strip()
