"""Find every small change of a source file that a test should notice.

Left alone are lines whose change no behaviour shows: annotations, decorators, docstrings, log lines
and what only a type checker reads.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
NEGATING = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "log"}
LOG_FUNCTIONS = {"log_failure", "log_unexpected"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    `text` is its line without the indent, `function` the dotted name of what it stands in. Of equal
    changes of equal lines in one function `nth` tells which. `start` and `end` are byte offsets;
    `lines` are those of the statement, `coroutine` those of the coroutine that it stands in.
    """

    path: str
    function: str
    text: str
    change: str
    nth: int
    start: int
    end: int
    replacement: str
    lines: tuple[int, int]
    in_function: bool
    coroutine: tuple[int, int] | None

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The name of the change, the same while lines move."""
        return self.path, self.function, self.text, self.change, self.nth

    def apply(self, source: str) -> str:
        """Return the source of the file with the change made."""
        data = source.encode()
        return (data[: self.start] + self.replacement.encode() + data[self.end :]).decode()


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every change of one file, in the order of its text."""
    found = sorted(_Finder(path, source).found(), key=lambda one: (one.start, one.change))
    seen: Counter[tuple[str, str, str]] = Counter()
    numbered = []
    for mutant in found:
        place = mutant.function, mutant.text, mutant.change
        numbered.append(replace(mutant, nth=seen[place]))
        seen[place] += 1
    return numbered


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._data = source.encode()
        self._tree = ast.parse(source)
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._functions = 0
        self._lines = (1, 1)
        self._coroutine: tuple[int, int] | None = None

    def found(self) -> Iterator[Mutant]:
        yield from self._body(self._tree.body)

    # -- statements --

    def _body(self, statements: list[ast.stmt]) -> Iterator[Mutant]:
        for statement in statements:
            yield from self._statement(statement)

    def _statement(self, node: ast.stmt) -> Iterator[Mutant]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._definition(node)
            return
        if _is_left_alone(node):
            return
        self._lines = node.lineno, _end_of_head(node)
        yield from self._removal(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.withitem | ast.match_case) and not (
                isinstance(node, ast.AnnAssign) and child is node.annotation
            ):
                yield from self._expression(child, node)
        for name in ("body", "orelse", "finalbody"):
            yield from self._body(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from self._body(handler.body)
        for case in getattr(node, "cases", []):
            yield from self._body(case.body)

    def _definition(self, node: ast.ClassDef | _Function) -> Iterator[Mutant]:
        if node.name in ("__repr__", "__str__"):
            return
        self._names.append(node.name)
        around = self._coroutine
        if not isinstance(node, ast.ClassDef):
            self._lines = node.lineno, node.body[0].lineno - 1
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    yield from self._expression(default, node)
            self._functions += 1
            assert node.end_lineno is not None
            is_coroutine = isinstance(node, ast.AsyncFunctionDef)
            self._coroutine = (node.lineno, node.end_lineno) if is_coroutine else None
        yield from self._body(node.body)
        if not isinstance(node, ast.ClassDef):
            self._functions -= 1
        self._coroutine = around
        self._names.pop()

    def _removal(self, node: ast.stmt) -> Iterator[Mutant]:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await()):
                what = "the call"
            case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                what = "the assignment"
            case ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
                what = type(node).__name__.lower()
            case ast.Return(value=None):
                what = "return"
            case _:
                return
        yield self._change(node, f"without {what}", "pass")

    # -- expressions --

    def _expression(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Call) and _is_log(node):
            return
        if isinstance(node, ast.match_case):
            if node.guard is not None:
                yield from self._negation(node.guard)
                yield from self._expression(node.guard, node)
            return
        yield from self._tests(node)
        yield from self._operators(node, parent)
        yield from self._values(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.Lambda) and isinstance(child, ast.arguments):
                continue
            yield from self._expression(child, node)

    def _tests(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield from self._negation(test)
        if isinstance(node, ast.IfExp):
            yield from self._negation(node.test)

    def _negation(self, test: ast.expr) -> Iterator[Mutant]:
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], NEGATING):
            return  # the operator's own change does the same
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        yield self._change(test, "negated", f"not ({self._source(test)})")

    def _operators(self, node: ast.AST, parent: ast.AST) -> Iterator[Mutant]:
        if isinstance(parent, ast.If | ast.While) and node is parent.test:
            yield from self._negation(parent.test)
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, right, comparison in zip(operands, operands[1:], node.ops, strict=False):
                    yield self._between(left, right, *COMPARISONS[type(comparison)])
            case ast.BoolOp():
                pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield self._between(left, right, *pair)
            case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_of_text_or_types(node):
                yield self._between(node.left, node.right, *ARITHMETIC[type(node.op)])
            case ast.UnaryOp(op=ast.Not()):
                yield self._change(node, "without not", f"({self._source(node.operand)})")
            case ast.UnaryOp(op=ast.USub()):
                yield self._change(node, "without -", f"({self._source(node.operand)})")
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield self._change(node.func, f"{name} becomes {NAMES[name]}", NAMES[name])

    def _values(self, node: ast.AST) -> Iterator[Mutant]:
        if not isinstance(node, ast.Constant):
            return
        if isinstance(node.value, bool):
            yield self._change(node, f"{node.value} becomes {not node.value}", str(not node.value))
        elif isinstance(node.value, int | float):
            other = _other_number(node.value)
            yield self._change(node, f"{self._source(node)} becomes {other}", repr(other))

    # -- text --

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutant:
        start, end = self._offsets(left)[1], self._offsets(right)[0]
        gap = self._data[start:end].decode()
        pattern = r"\s+".join(map(re.escape, old.split()))
        if old[0].isalpha():
            pattern = rf"\b{pattern}\b"
        found = re.search(pattern, gap)
        if found is None:
            raise ValueError(f"{self._path}: no {old!r} in {gap!r}")
        begin = start + len(gap[: found.start()].encode())
        return self._mutant(begin, begin + len(found[0].encode()), f"{old} becomes {new}", new)

    def _change(self, node: ast.expr | ast.stmt, change: str, replacement: str) -> Mutant:
        return self._mutant(*self._offsets(node), change, replacement)

    def _mutant(self, start: int, end: int, change: str, replacement: str) -> Mutant:
        begin = self._data.rfind(b"\n", 0, start) + 1
        finish = self._data.find(b"\n", start)
        line = self._data[begin : None if finish < 0 else finish].decode().strip()
        function = ".".join(self._names)
        return Mutant(
            self._path,
            function,
            line,
            change,
            0,
            start,
            end,
            replacement,
            self._lines,
            self._functions > 0,
            self._coroutine,
        )

    def _offsets(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _source(self, node: ast.expr) -> str:
        start, end = self._offsets(node)
        return self._data[start:end].decode()


def _other_number(number: float) -> float:
    """Return the next small number, or double a large one: one more second, or byte of a megabyte,
    is the same to everybody."""
    if isinstance(number, int):
        return number + 1 if number < 10 else 2 * number
    return 2 * number or 1.0


def _end_of_head(node: ast.stmt) -> int:
    """The last line of a statement, or of what stands before its body."""
    body: list[ast.stmt] | None = getattr(node, "body", None)
    if body:
        return max(node.lineno, body[0].lineno - 1)
    return node.end_lineno or node.lineno


def _is_left_alone(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case (
            ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call))
        ):
            return _is_log(call)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _is_log(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=owner), attr=method):
            return "log" in owner.lower() and method in LOG_METHODS
        case ast.Name(id=name):
            return name in LOG_FUNCTIONS
    return False


def _is_of_text_or_types(node: ast.BinOp) -> bool:
    """Tell a concatenation of text and a union of types from arithmetic."""
    sides = node.left, node.right
    if isinstance(node.op, ast.BitOr):
        return any(
            (isinstance(side, ast.Name) and side.id[:1].isupper())
            or (isinstance(side, ast.Name) and side.id in ("int", "str", "float", "bytes", "bool"))
            or (isinstance(side, ast.Constant) and side.value is None)
            for side in sides
        )
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )
