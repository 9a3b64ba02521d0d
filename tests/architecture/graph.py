"""Judge the import graph: cycles, arrows against the layers, modules with one importer."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import ROOT, Module

LONELY_LINES = 80
"""A module with one importer stands alone for a reason only from this many lines of code on."""

Graph = Mapping[str, set[str]]


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, each sorted, biggest first."""
    search = _Components(graph)
    for name in sorted(graph):
        if name not in search.order:
            search.visit(name)
    return sorted(search.found, key=lambda group: (-len(group), group))


class _Components:
    """Tarjan's search for strongly connected components of more than one module."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._stack: list[str] = []
        self._lowest: dict[str, int] = {}
        self.order: dict[str, int] = {}
        self.found: list[list[str]] = []

    def visit(self, root: str) -> None:
        """Search from one module. Keeps its own stack: a chain of imports may be long."""
        pending = [self._enter(root)]
        while pending:
            name, targets = pending[-1]
            if not targets:
                pending.pop()
                if pending:
                    self._reach(pending[-1][0], self._lowest[name])
                self._close(name)
                continue
            target = targets.pop()
            if target not in self.order:
                pending.append(self._enter(target))
            elif target in self._stack:
                self._reach(name, self.order[target])

    def _enter(self, name: str) -> tuple[str, list[str]]:
        self.order[name] = self._lowest[name] = len(self.order)
        self._stack.append(name)
        return name, sorted(self._graph[name])

    def _reach(self, name: str, order: int) -> None:
        self._lowest[name] = min(self._lowest[name], order)

    def _close(self, name: str) -> None:
        if self._lowest[name] != self.order[name]:
            return
        start = self._stack.index(name)
        group = sorted(self._stack[start:])
        del self._stack[start:]
        if len(group) > 1:
            self.found.append(group)


@dataclass(frozen=True)
class Lonely:
    """A small module with one importer."""

    name: str
    importer: str
    code_lines: int


def lonely_modules(modules: Mapping[str, Module], graph: Graph) -> list[Lonely]:
    """Return the small modules with exactly one importer, other than `__init__` of packages."""
    importers: dict[str, list[str]] = {name: [] for name in modules}
    for name, targets in graph.items():
        for target in targets:
            importers[target].append(name)
    return [
        Lonely(name, importers[name][0], module.code_lines)
        for name, module in sorted(modules.items())
        if not module.is_package and len(importers[name]) == 1 and module.code_lines < LONELY_LINES
    ]


@dataclass(frozen=True)
class Layers:
    """The order of the rooms, highest first. Rooms of one layer may be barred from each other."""

    level: Mapping[str, int]
    independent: frozenset[int]

    def allow(self, importer: str, imported: str) -> bool:
        """Return whether a room may import another."""
        if importer == imported:
            return True
        above, below = self.level[importer], self.level[imported]
        return above < below or (above == below and above not in self.independent)


def read_layers(pyproject: Path = ROOT / "pyproject.toml") -> Layers:
    """Read the layers contract that import-linter holds."""
    contracts = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["type"] == "layers")
    return parse_layers(contract["layers"])


def parse_layers(rows: Iterable[str]) -> Layers:
    """Read rows as import-linter writes them: `a | b` are independent, `a : b` are not."""
    level: dict[str, int] = {}
    independent: set[int] = set()
    for number, row in enumerate(rows):
        if ":" not in row:
            independent.add(number)
        for room in row.replace("|", ":").split(":"):
            level[room.strip(" ()")] = number
    return Layers(level, frozenset(independent))


def unplaced_rooms(modules: Mapping[str, Module], layers: Layers) -> list[str]:
    """Return the rooms that the layers do not name; `__main__` of the package is no room."""
    rooms = {module.room for module in modules.values()} - {"", "__main__"}
    return sorted(rooms - set(layers.level))


def upward_arrows(modules: Mapping[str, Module], graph: Graph, layers: Layers) -> list[str]:
    """Return the imports that go against the layers."""
    return [
        f"{name} imports {target}"
        for name in sorted(graph)
        for target in sorted(graph[name])
        if modules[name].room in layers.level
        and modules[target].room in layers.level
        and not layers.allow(modules[name].room, modules[target].room)
    ]
