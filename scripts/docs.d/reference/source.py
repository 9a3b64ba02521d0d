"""Reads the text of the code: docstrings, log calls, imports, markers."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "conveyor"

MARKER = "pytest.mark.guarantee"
LEVELS = {"debug", "info", "warning", "error"}


def modules(below: Path) -> list[Path]:
    """Return every module below a directory, in order."""
    return sorted(below.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def texts_of(owner: type | ModuleType) -> dict[str, str]:
    """Return the docstrings below the assignments of a class or module, by name."""
    tree = ast.parse(inspect.getsource(owner))
    body = tree.body if isinstance(owner, ModuleType) else _only_class(tree).body
    found = {}
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            text = _text(following)
            if text:
                found[statement.targets[0].id] = " ".join(text.split())
    return found


def _only_class(tree: ast.Module) -> ast.ClassDef:
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return found


def _text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


# -- rooms --


def rooms() -> dict[str, set[str]]:
    """Return the rooms of the package, each with the rooms that it imports from."""
    found: dict[str, set[str]] = {}
    for path in modules(PACKAGE):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if not room.startswith("__"):
            found.setdefault(room, set()).update(set(_imported(parsed(path))) - {room})
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name.split(".")[1] for name in names if name.startswith("conveyor."))


# -- log lines --


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """One call of a logger."""

    logger: str
    message: str
    level: str
    fields: tuple[str, ...]
    module: str


def log_lines() -> list[LogLine]:
    """Return every log line whose message is a literal in the code."""
    found: set[LogLine] = set()
    for path in modules(PACKAGE):
        if "logging" not in path.read_text(encoding="utf-8"):
            continue
        tree = parsed(path)
        loggers = set(_loggers(tree))
        if loggers:
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.update(_lines(tree, loggers, dotted.removesuffix(".__init__")))
    return sorted(found)


def _loggers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module that are loggers."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "logging.getLogger"
        ):
            yield node.targets[0].id


HELPERS = ("log_and_continue", "log_failure", "logging_failure")
"""Functions of conveyor.aio.resilience that log an error after the words that they are given."""


def _lines(tree: ast.Module, loggers: set[str], dotted: str) -> Iterator[LogLine]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in HELPERS:
            if ast.unparse(node.args[0]) in loggers:
                yield _failure(node, dotted)
            continue
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, level = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id in loggers and node.args):
            continue
        if level not in LEVELS | {"exception"} or not isinstance(node.args[0], ast.Constant):
            continue
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        fields = [*_keys(tree, named["extra"])] if "extra" in named else []
        traceback = level == "exception" or "exc_info" in named
        yield LogLine(
            logger=getattr(import_module(dotted), owner.id).name,
            message=str(node.args[0].value),
            level="error" if level == "exception" else level,
            fields=(*fields, *(["a traceback"] if traceback else [])),
            module=dotted,
        )


def _failure(call: ast.Call, dotted: str) -> LogLine:
    """The line of an error that was expected; others go to the logger of the unexpected."""
    logger, failed = ast.unparse(call.args[0]), call.args[1]
    parts = failed.values if isinstance(failed, ast.JoinedStr) else [failed]
    words = (str(part.value) if isinstance(part, ast.Constant) else "%s" for part in parts)
    return LogLine(
        logger=getattr(import_module(dotted), logger).name,
        message="".join(words) + ": %s",
        level="warning",
        fields=(),
        module=dotted,
    )


def _keys(tree: ast.Module, extra: ast.expr) -> Iterator[str]:
    """Yield the keys of a dictionary, also of one that was assigned to a name before."""
    given = [extra]
    if isinstance(extra, ast.Name):
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        given = [one.value for one in assigned if ast.unparse(one.targets[0]) == extra.id]
    for found in given:
        if isinstance(found, ast.Dict):
            yield from (str(key.value) for key in found.keys if isinstance(key, ast.Constant))


# -- tests --


@cache
def marked_tests() -> dict[str, list[str]]:
    """Return the tests with each guarantee's marker, as file::name; a file if the marker is on all
    of it."""
    found: dict[str, list[str]] = {}
    for path in modules(ROOT / "tests"):
        if not path.name.startswith("test_") or MARKER not in path.read_text(encoding="utf-8"):
            continue
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for guarantee in _marks(node.decorator_list):
                    found.setdefault(guarantee, []).append(f"{file}::{node.name}")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                for guarantee in _marks([node.value]):
                    found.setdefault(guarantee, []).append(file)
    return {guarantee: sorted(tests) for guarantee, tests in found.items()}


def _marks(expressions: list[ast.expr]) -> Iterator[str]:
    for expression in expressions:
        for node in ast.walk(expression):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == MARKER:
                yield from (ast.literal_eval(argument) for argument in node.args)
