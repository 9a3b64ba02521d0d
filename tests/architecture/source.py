"""Read the package as source: its modules, their lines of code, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.disk import files_below

ROOT = Path(__file__).parents[2]
PACKAGE = "conveyor"


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name and its text."""

    name: str
    path: str
    text: str

    @property
    def is_package(self) -> bool:
        """Return whether the file is the `__init__` of a package."""
        return self.path.endswith("__init__.py")

    @property
    def room(self) -> str:
        """The part of the name below the package; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def code_lines(self) -> int:
        """Count the lines that are not blank, not a comment and not a docstring."""
        return len(code_lines(self.text, self.tree))


def code_lines(text: str, tree: ast.Module | None = None) -> set[int]:
    """Return the numbers of the lines of code in a file; `tree` saves parsing it again.

    A string that stands alone as a statement is a docstring, also below an attribute.
    """
    docstrings: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(tree or ast.parse(text)):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            docstrings.update(_lines_of(node))
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            strings.update(_lines_of(node))
    return {
        number
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
        and number not in docstrings
        # A line of a long string may begin like a comment.
        and (number in strings or not line.lstrip().startswith("#"))
    }


def blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements, handlers of exceptions and cases directly below a node."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        part = getattr(node, name, ())
        if isinstance(part, list):  # the body of a lambda is an expression
            yield from part


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield every statement of a module, and no expression, of which there are ten times as
    many."""
    below: list[ast.AST] = [tree]
    while below:
        node = below.pop()
        yield node
        below.extend(blocks(node))


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def read_modules(root: Path = ROOT, package: str = PACKAGE) -> dict[str, Module]:
    """Read every module of a package, by dotted name."""
    modules: dict[str, Module] = {}
    for path in sorted(files_below(root / package, ".py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, relative.as_posix(), path.read_text())
    return modules


def imported_by(module: Module, modules: dict[str, Module]) -> set[str]:
    """Return the modules that a module imports anywhere: at the top, in a function, for types.

    `from package import name` is an import of the module `package.name` if there is one, and of
    `package` otherwise.
    """
    found: set[str] = set()
    for node in statements(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                child = f"{node.module}.{alias.name}"
                found.add(child if child in modules else node.module)
    return {name for name in found if name in modules and name != module.name}


def import_graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return the imports of every module."""
    return {name: imported_by(module, modules) for name, module in modules.items()}
