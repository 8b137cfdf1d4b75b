"""Changes of one operator or number in Python source, for mutation testing: where they are and what they make of it.

Only expressions inside functions count, since nothing tells which test runs a module's own level. Words of errors
(below `raise`), annotations and f-strings are left out: no behaviour is in them.
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
    """A change of one place of a file."""

    line: int  # counted from 1
    # start, stop: the bytes of the source that change, `stop` excluded
    start: int
    stop: int
    new: str  # what stands there instead
    # node_start, node_stop: the bytes of the expression around it, which is run if and only if the change is
    node_start: int
    node_stop: int

    def applied(self, source: bytes) -> bytes:
        """Return the source with this change."""
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def words(self, source: bytes) -> str:
        """Return the line before and after; where an expression goes over several, the one that changes."""
        return f"`{_line_at(source, self.start)}` -> `{_line_at(self.applied(source), self.start)}`"


def mutations(source: bytes) -> list[Mutation]:
    """Return all changes of one operator or number inside the functions of a module, in the order of the source."""
    places = _Places(source)
    found = {change for node in _expressions(ast.parse(source)) for change in _changes(node, places)}
    return sorted(found, key=lambda it: (it.start, it.stop))


def probed(source: bytes, numbered: Iterable[tuple[int, Mutation]], call: str) -> bytes:
    """Return the source in which every numbered change's expression first calls `call`(number), a function of None.

    The expression's value stays what it is.
    """
    insertions = []
    for number, mutation in numbered:
        size = mutation.node_stop - mutation.node_start
        # Of two that begin at one place the larger one opens first; of two that end at one, it closes last.
        insertions.append((mutation.node_start, 1, -size, number, f"({call}({number}) or (".encode()))
        insertions.append((mutation.node_stop, 0, size, -number, b"))"))
    for place, *_, text in sorted(insertions, reverse=True):
        source = source[:place] + text + source[place:]
    return source


def _expressions(tree: ast.AST, inside: bool = False) -> Iterator[ast.expr]:
    """Yield what can be changed inside functions; see the module for what is left out."""
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
    """Where expressions stand in a source, in bytes."""

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
        """Return the span of the operator that stands between two operands, beside parentheses and blanks."""
        after, before = self.span(first)[1], self.span(second)[0]
        start = self.source.index(operator.encode(), after, before)
        return start, start + len(operator)


def _changes(node: ast.expr, places: _Places) -> Iterator[Mutation]:
    """Yield what can become of an expression; an operand's own changes are the operand's."""
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
            # One more changes every number, and no tolerance takes it for the same.
            text = places.source[around[0] : around[1]].decode()
            yield Mutation(node.lineno, *around, f"({text} + 1)", *around)


def _line_at(source: bytes, place: int) -> str:
    return source[source.rfind(b"\n", 0, place) + 1 :].split(b"\n", 1)[0].decode().strip()
