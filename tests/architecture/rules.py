"""Find what the package should not have: shared names of types, long signatures, whole bindings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.architecture.source import Module, blocks, statements

MOST_PARAMETERS = 7
ADAPTERS = frozenset({"dev", "prod", "simulation", "testing"})
"""Rooms whose types may share a name if they implement the same port."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


# -- names of types --


@dataclass(frozen=True)
class PublicType:
    """A class or NewType at the top level of a module, without a leading underscore."""

    name: str
    module: Module
    bases: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()

    @property
    def is_port(self) -> bool:
        """Return whether it is a Protocol of `ports`."""
        return self.module.room == "ports" and "Protocol" in self.bases

    def implements(self, port: PublicType) -> bool:
        """Return whether it is an adapter with the port among its bases, or with all of its
        methods."""
        if self.module.room not in ADAPTERS:
            return False
        return port.name in self.bases or (bool(port.methods) and port.methods <= self.methods)


def public_types(module: Module) -> Iterator[PublicType]:
    """Yield the public types that a module defines. What it re-exports is defined elsewhere."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = frozenset(map(_last_name, node.bases))
            yield PublicType(node.name, module, bases, frozenset(_public_methods(node)))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            is_new_type = _last_name(node.value.func) == "NewType"
            if is_new_type and isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield PublicType(target.id, module)


def _public_methods(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, Function) and not item.name.startswith("_"):
            yield item.name


def _last_name(node: ast.expr) -> str:
    """Return `Name` of `Name`, of `package.Name` and of `Name[Parameter]`."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def shared_names(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return the names that several public types have, with the modules that define them.

    Adapters of one port may share a name.
    """
    by_name: dict[str, list[PublicType]] = {}
    for module in modules.values():
        for one in public_types(module):
            by_name.setdefault(one.name, []).append(one)
    ports = [one for types in by_name.values() for one in types if one.is_port]
    return {
        name: [one.module.name for one in types]
        for name, types in sorted(by_name.items())
        if len(types) > 1 and not any(all(one.implements(port) for one in types) for port in ports)
    }


# -- parameters --


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function below a node, under its name within the module."""
    for child in blocks(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, prefix)


def parameters(function: Function) -> list[ast.arg]:
    """Return the parameters of a function, `self` and `cls` excepted."""
    given = function.args
    named = [*given.posonlyargs, *given.args]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    return [*named, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def long_signatures(modules: Mapping[str, Module]) -> list[str]:
    """Return the functions with too many parameters, a name as often as functions have it."""
    return sorted(
        name
        for module in modules.values()
        for name, function in functions(module.tree)
        if len(parameters(function)) > MOST_PARAMETERS
    )


# -- the whole binding --

_BINDING = re.compile(r"\bBinding\b")


def takes_binding(module: Module) -> Iterator[str]:
    """Yield the functions and classes of a module that take a whole `Binding`.

    A function takes it as a parameter, a class as an annotated field.
    """
    for name, function in functions(module.tree):
        if any(_is_binding(parameter.annotation) for parameter in parameters(function)):
            yield name
    for node in statements(module.tree):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(item, ast.AnnAssign) and _is_binding(item.annotation) for item in node.body
        ):
            yield node.name


def _is_binding(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(_BINDING.search(ast.unparse(annotation)))


def handlers_with_binding(modules: Mapping[str, Module]) -> list[str]:
    """Return what takes a whole `Binding` in the handlers."""
    return sorted(
        name
        for module in modules.values()
        if module.room == "handlers"
        for name in takes_binding(module)
    )
