"""All pages, and their paths."""

from __future__ import annotations

from reference import api, dashboards, programs, project, storage
from reference.markdown import first_difference, page
from reference.source import ROOT

DIRECTORY = ROOT / "docs" / "reference"

PAGES = {
    "settings.md": ("every environment variable", programs.settings),
    "commands.md": ("commands of users and servers, and exit codes", programs.commands),
    "admin-commands.md": ("the commands of an operator", programs.admin_commands),
    "routes.md": ("every route of the API with its answers", api.routes),
    "answers.md": ("every document that is sent or answered", api.answers),
    "error-codes.md": ("every error code, every reason of a refused task", api.error_codes),
    "scraper-params.md": ("every scraper param", programs.scraper_params),
    "metrics.md": ("every metric", programs.metrics),
    "log-events.md": ("every log line whose message is a literal in the code", programs.log_events),
    "columns.md": ("data stored in development: files and tables", storage.columns),
    "items.md": ("data stored in production: items, queues, rules, keys", storage.items),
    "ports.md": ("every method of the ports but those of records", project.ports),
    "record-ports.md": ("every method of the ports of jobs, runs and tasks", project.record_ports),
    "rooms.md": ("the parts of the package, and what each imports", project.rooms_page),
    "dependencies.md": ("every dependency, and why", project.dependencies),
    "guarantees.md": ("every guarantee, and the tests that prove it", project.guarantees),
}
"""Each file: its subject, and the function that makes it."""


DASHBOARDS = {
    dashboards.DEPLOY / "dashboard.json": dashboards.cloudwatch,
    dashboards.DEPLOY / "grafana.json": dashboards.grafana,
}
"""Each file for those who operate a fleet, and the function that makes it."""


def _index() -> str:
    return page(
        "Reference",
        "Tables made from the code. A test fails while a file is out of date.",
        "\n".join(f"- [{name}]({name}): {about}" for name, (about, _) in PAGES.items()),
    )


def made(name: str) -> str:
    """Return the content that a file must have."""
    return _index() if name == "README.md" else PAGES[name][1]()


def names() -> list[str]:
    """Return the name of every file."""
    return ["README.md", *PAGES]


def write() -> None:
    """Write every file, and remove any other file."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in names():
        (DIRECTORY / name).write_text(made(name), encoding="utf-8")
    for name in _unknown_files():
        (DIRECTORY / name).unlink()
    for path, made_by in DASHBOARDS.items():
        path.write_text(made_by(), encoding="utf-8")


def stale() -> dict[str, str]:
    """Return each file that is out of date, with the first line that differs."""
    found = {
        f"docs/reference/{name}": difference
        for name in names()
        if (difference := difference_of(name))
    }
    found |= {
        str(path.relative_to(ROOT)): "it is not what scripts/docs writes"
        for path, made_by in DASHBOARDS.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != made_by()
    }
    unknown = [f"docs/reference/{name}" for name in _unknown_files()]
    return found | dict.fromkeys(unknown, "no page has this name")


def difference_of(name: str) -> str:
    """Return the first line of a file that differs; empty if it is up to date."""
    path = DIRECTORY / name
    written = path.read_text(encoding="utf-8") if path.is_file() else ""
    wanted = made(name)
    return "" if written == wanted else first_difference(written, wanted)


def _unknown_files() -> list[str]:
    there = sorted(path.name for path in DIRECTORY.glob("*.md"))
    return [name for name in there if name not in names()]
