"""Pages about the project: rooms, ports, dependencies, guarantees."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib import import_module

from reference.markdown import code, joined, page, table
from reference.source import PACKAGE, ROOT, marked_tests, modules, rooms

PYPROJECT = ROOT / "pyproject.toml"


def rooms_page() -> str:
    """Return the subject of each room of the package, and its imports."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    return page(
        "Rooms",
        "The parts of the package `conveyor`, and the parts that each imports from.",
        table(
            ["Room", "Holds", "Imports from"],
            [
                [
                    code(room),
                    joined(import_module(f"conveyor.{room}").__doc__),
                    code(*sorted(imported)),
                ]
                for room, imported in sorted(rooms().items())
            ],
        ),
        "import-linter checks these contracts of `pyproject.toml`:",
        "\n".join(f"- {contract['name']}" for contract in contracts),
    )


def ports() -> str:
    """Return every method of the ports but those of records, by module."""
    return page("Ports", joined(import_module("conveyor.ports").__doc__), *_ports(records=False))


def record_ports() -> str:
    """Return every method of the ports of jobs, runs and tasks, by module."""
    about = "The rows of jobs, runs and tasks, by who calls: worker, API, maintenance."
    return page("Ports of records", about, *_ports(records=True))


RECORDS = {"records", "tasks", "maintenance", "ingestion"}


def _ports(*, records: bool) -> list[str]:
    blocks = []
    for path in modules(PACKAGE / "ports"):
        if (path.stem in RECORDS) is not records:
            continue
        module = import_module(f"conveyor.ports.{path.stem}")
        found = [
            block
            for name, port in vars(module).items()
            if getattr(port, "_is_protocol", False) and port.__module__ == module.__name__
            for block in _port(name, port)
        ]
        if found:
            blocks += [f"## {code(path.relative_to(ROOT).as_posix())}", *found]
    return blocks


def _port(name: str, port: type) -> list[str]:
    own = [one for one in vars(port).items() if inspect.isfunction(one[1])]
    methods = [
        [code(method), joined(one.__doc__)] for method, one in own if not method.startswith("_")
    ]
    return [
        f"### {name}",
        joined(port.__doc__),
        table(["Method", "Contract"], methods) if methods else "",
    ]


def dependencies() -> str:
    """Return every dependency, and its reason."""
    text = PYPROJECT.read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    groups = {
        "Always": project["dependencies"],
        **{
            f"With the extra `{extra}`": lines
            for extra, lines in project["optional-dependencies"].items()
        },
    }
    reasons = dict(re.findall(r'^ *"([^"]+)",  # (.+)$', text, re.MULTILINE))
    return page(
        "Dependencies",
        "As `pyproject.toml` has them; `constraints.lock` pins what is installed.",
        *(
            block
            for title, lines in groups.items()
            for block in (
                f"## {title}",
                table(
                    ["Package", "Versions", "Why"],
                    [_package(line, reasons[line]) for line in lines],
                ),
            )
        ),
    )


def _package(line: str, why: str) -> list[str]:
    requirement, _, condition = line.partition(";")
    name = re.split(r"[<>=!~]", requirement)[0]
    versions = requirement.removeprefix(name)
    shown = [code(versions)] if versions else []
    return [code(name), ", ".join([*shown, *([condition.strip()] if condition else [])]), why]


def promises() -> dict[str, str]:
    """Return the guarantees of SPEC.md, by id."""
    spec = (ROOT / "SPEC.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (G\d+) \| (.+) \|$", spec, re.MULTILINE))


def guarantees() -> str:
    """Return every guarantee with the tests that prove it."""
    tests = marked_tests()
    return page(
        "Guarantees",
        "The sentences are those of SPEC.md. A test that proves one carries "
        '`@pytest.mark.guarantee("G5")`.',
        *(
            block
            for guarantee, sentence in promises().items()
            for block in (
                f"## {guarantee}",
                sentence,
                "\n".join(f"- {code(test)}" for test in tests.get(guarantee, [])),
            )
        ),
    )
