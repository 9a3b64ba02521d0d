"""CONTRIBUTING.md's bounds on modules and functions hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.disk import files_below

ROOT = Path(__file__).parents[2]
MODULE_LINES = 400
FUNCTION_LINES = 50
MODULES = sorted(
    path
    for folder in ("conveyor", "bench", "tests", "scripts")
    for path in files_below(ROOT / folder, ".py")
)


def too_long(source: str) -> Iterator[str]:
    """What of a module is above its bound."""
    lines = len(source.splitlines())
    if lines > MODULE_LINES:
        yield f"the module has {lines} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{node.name} has {length} lines"


def test_no_module_and_no_function_outgrows_its_bound() -> None:
    assert len(MODULES) > 700
    found = {str(path.relative_to(ROOT)): list(too_long(path.read_text())) for path in MODULES}
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_what_outgrows_its_bound_is_named() -> None:
    body = "\n".join("    x = 0" for _ in range(FUNCTION_LINES))
    assert list(too_long(f"def long():\n{body}\n")) == ["long has 51 lines"]
    assert list(too_long("x = 0\n" * 401)) == ["the module has 401 lines"]
