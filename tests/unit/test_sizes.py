"""CONTRIBUTING.md's bounds on modules and functions hold."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator

from tests.architecture.figures import MOST_LINES
from tests.architecture.graph import read_layers
from tests.architecture.source import PACKAGE, ROOT, code_lines, statements
from tests.disk import files_below

FUNCTION_LINES = 50
FOLDERS = ("bench", "conveyor", "scripts", "tests")
MODULES = sorted(path for folder in FOLDERS for path in files_below(ROOT / folder, ".py"))


def too_long(source: str) -> Iterator[str]:
    """Yield what is above its bound in a module."""
    tree = ast.parse(source)
    if source.count("\n") > MOST_LINES and (lines := len(code_lines(source, tree))) > MOST_LINES:
        yield f"the module has {lines} lines of code"
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{node.name} has {length} lines"


def test_every_room_is_measured() -> None:
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in MODULES]
    rooms = {names[1] for names in parts if names[0] == PACKAGE}
    assert set(read_layers().level) <= rooms
    assert {names[0] for names in parts} == set(FOLDERS)


def test_the_linters_look_at_what_is_ours_and_at_nothing_that_somebody_keeps_beside_it() -> None:
    script = (ROOT / "scripts" / "lint").read_text()
    found = re.search(r"^ours=\((.+)\)$", script, re.MULTILINE)
    assert found is not None
    assert tuple(found[1].split()) == FOLDERS
    for called in re.findall(r"^ruff .+", script, re.MULTILINE):
        assert '"${ours[@]}"' in called
    if (ROOT / ".git").exists():
        listed = ["git", "-C", str(ROOT), "ls-files", "*.py"]
        kept = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        assert {path.partition("/")[0] for path in kept.splitlines()} == set(FOLDERS)


def test_no_module_and_no_function_outgrows_its_bound() -> None:
    found = {str(path.relative_to(ROOT)): list(too_long(path.read_text())) for path in MODULES}
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_what_outgrows_its_bound_is_named() -> None:
    body = "\n".join("    x = 0" for _ in range(FUNCTION_LINES))
    assert list(too_long(f"def long():\n{body}\n")) == ["long has 51 lines"]
    inner = f"if x:\n  pass\nelse:\n  try:\n    pass\n  except OSError:\n   def long():\n{body}\n"
    assert list(too_long(inner)) == ["long has 51 lines"]
    assert list(too_long("x = 0\n" * 701)) == ["the module has 701 lines of code"]
    assert list(too_long("# why\n\n" * 701)) == []
