"""SPEC.md against the code: what stands on one side stands on the other."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
import pytest

from conveyor import cli
from conveyor.bootstrap import open_dev
from conveyor.clock import SystemClock
from conveyor.domain import params
from conveyor.domain.errors import ErrorCode, InvalidTaskReason
from conveyor.engine.telemetry import COUNTERS, LABELLED_COUNTERS
from conveyor.http.openapi_operations import EXPORT_OPERATIONS, INPUT_OPERATIONS, OPERATIONS
from conveyor.http.problems import PROBLEMS
from conveyor.service import schemas
from conveyor.settings import PREFIX, SETTINGS, Settings, load
from tests.disk import files_below
from tests.unit.spec_document import ROOT, SPEC, name, names, once, section, table

CLIENT_VARIABLES = {"CONVEYOR_URL"}
TEST_VARIABLES = {"CONVEYOR_TEST_AWS", "CONVEYOR_TEST_REDIS_SERVER"}
EMULATORS = ROOT / "scripts" / "emulators.d" / "programs.py"
EVERYWHERE = {403, 500, 503}
"""What any route may answer."""


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


# -- settings --


def _shown(value: object) -> str:
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"`{value:g}`" if value < 1_000_000 else f"`{int(value)}`"
        case "":
            return "empty"
        case _:
            return f"`{value}`"


def test_every_setting_stands_with_its_default_and_unit() -> None:
    rows = table("Variable", "Default", "Unit", "Meaning")
    defaults = Settings()

    assert {name(row[0]): row[1] for row in rows} == {
        setting.variable: _shown(getattr(defaults, setting.name)) for setting in SETTINGS
    }
    assert len(rows) == len(SETTINGS)
    assert all(row[2] and row[3] for row in rows)


def test_every_default_of_the_production_roles_stands() -> None:
    rows = table("Variable of a role", "Default")

    assert {name(row[0]): row[1] for row in rows} == {
        setting.variable: _shown(setting.production)
        for setting in SETTINGS
        if setting.production is not None
    }


def test_every_field_of_the_settings_is_a_setting() -> None:
    assert {field.name for field in fields(Settings)} == {setting.name for setting in SETTINGS}


def test_no_variable_is_named_that_nothing_reads() -> None:
    known = {setting.variable for setting in SETTINGS} | CLIENT_VARIABLES
    files = {setting.file_variable for setting in SETTINGS if setting.secret}
    variables = set(re.findall(rf"\b{PREFIX}[A-Z0-9_]+\b", SPEC))

    assert variables <= known | files | _of_tests()
    assert files <= variables


def _of_tests() -> set[str]:
    """The variables that tests read: one for each service that an emulator stands for."""
    emulators = runpy.run_path(str(EMULATORS), run_name="programs")["emulators"](Path())
    services = {service for emulator in emulators for service in emulator.addresses}
    return {f"{PREFIX}TEST_{service}" for service in services} | TEST_VARIABLES


def test_every_variable_of_the_tests_stands() -> None:
    rows = table("Test variable", "Meaning")

    assert once(variable for row in rows for variable in names(row[0])) == _of_tests()


# -- the wire --


@pytest.fixture
async def app_client(tmp_path: Path) -> Any:
    """A client of the application as bootstrap assembles it, over a data directory of its own."""
    settings = load({}, data_dir=str(tmp_path / "data"), gateway="fake")
    runtime = await open_dev(settings, SystemClock(), origin="http://127.0.0.1:9000")
    transport = httpx.ASGITransport(app=runtime.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9000") as client:
        yield client
    await runtime.aclose()


def spec_routes() -> set[tuple[str, str]]:
    routes = [(row[0], name(row[1])) for row in table("Method", "Path", "Success")]
    assert len(routes) == len(set(routes))
    return set(routes)


async def test_every_route_stands_in_the_table(app_client: httpx.AsyncClient) -> None:
    app = app_client._transport.app  # type: ignore[attr-defined]
    served = {
        (method, route.path) for route in app.routes for method in route.methods if method != "HEAD"
    }

    assert spec_routes() == served


async def test_the_openapi_document_tells_of_the_same_routes(app_client: httpx.AsyncClient) -> None:
    document = (await app_client.get("/openapi.json")).json()
    prefix = _prefix(document)
    told = {
        (method.upper(), prefix + path)
        for path, item in document["paths"].items()
        for method in item
        if method in {"get", "put", "post", "delete", "patch", "head", "options"}
    }

    assert told == spec_routes()


def _prefix(document: dict[str, Any]) -> str:
    """What the paths of the document are relative to."""
    server: str = document.get("servers", [{"url": "/"}])[0]["url"]
    return httpx.URL(server).path.rstrip("/")


async def test_exactly_the_routes_marked_so_answer_501(app_client: httpx.AsyncClient) -> None:
    headers = {"X-API-Key": "docs"}
    created = await app_client.post(
        "/v1/jobs", json={"tasks": [{"url": "http://fake.test/"}]}, headers=headers
    )
    job = created.json()
    ids = {
        "job_id": job["job_id"],
        "run_id": job["latest_run"]["run_id"],
        "task_id": "0" * 26,
        "export_id": job["job_id"],
        "input_id": job["job_id"],
    }
    marked = {(row[0], name(row[1])) for row in table("Method", "Path") if row[2].startswith("501")}
    answered = set()
    for method, path in sorted(spec_routes() - {("DELETE", "/v1/jobs/{job_id}")}):
        answer = await app_client.request(method, path.format(**ids), headers=headers)
        if answer.status_code == 501:
            assert answer.json()["code"] == "not_implemented"
            answered.add((method, path))

    assert answered == marked


def test_every_error_code_stands_with_its_status() -> None:
    rows = table("Code", "Status", "Meaning")

    assert {name(row[0]): int(row[1]) for row in rows} == {
        code.value: status for code, (status, _title) in PROBLEMS.items()
    }
    assert once(name(row[0]) for row in rows) == set(ErrorCode)


def test_every_route_stands_with_its_answers() -> None:
    told: dict[tuple[str, str], set[int]] = {}
    for method, path, success, refusals in table("Method", "Path", "Success", "Refusals"):
        statuses = {PROBLEMS[ErrorCode(code)][0] for code in names(refusals)} | EVERYWHERE
        statuses |= {int(number) for number in re.findall(r"\b[245]\d\d\b", success)}
        told[method, name(path)] = statuses if "no key" in success else statuses | {401}

    assert told == {
        (operation.method.upper(), operation.path): {
            operation.success,
            *((202,) if operation.later else ()),
            *operation.errors,
            *EVERYWHERE,
            *(() if operation.open else (401,)),
        }
        for operation in (
            *OPERATIONS,
            *INPUT_OPERATIONS,
            *EXPORT_OPERATIONS,
        )
    }


def test_every_reason_of_an_invalid_task_stands() -> None:
    rows = table("Reason", "Meaning")

    assert once(name(row[0]) for row in rows) == set(InvalidTaskReason)


ANSWERS: dict[str, type[msgspec.Struct]] = {
    "spend": schemas.SpendBody,
    "stats": schemas.StatsBody,
    "run": schemas.RunBody,
    "job": schemas.JobBody,
    "callback": schemas.CallbackBody,
    "jobs": schemas.JobsPage,
    "runs": schemas.RunsPage,
    "submitted": schemas.SubmitBody,
    "added": schemas.AddTasksBody,
    "rerun": schemas.RerunBody,
    "problem of a task": schemas.ProblemBody,
    "result": schemas.ResultBody,
    "results": schemas.ResultsPage,
    "event": schemas.EventBody,
    "history": schemas.HistoryBody,
    "upload": schemas.UploadBody,
    "file input": schemas.JobInputBody,
    "export begun": schemas.StartExportBody,
    "export": schemas.ExportBody,
}


def test_every_field_of_every_answer_stands() -> None:
    described = {
        value
        for module in (schemas, schemas, schemas)
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    rows = {row[0]: names(row[1]) for row in table("Answer", "Fields")}

    assert set(ANSWERS.values()) == described
    assert rows == {answer: list(shape.__struct_fields__) for answer, shape in ANSWERS.items()}


def test_every_scraper_param_stands() -> None:
    listed = [word for row in table("Param", "Takes") for word in names(row[0])]

    assert once(listed) == params.KNOWN


# -- metrics --


async def test_every_metric_stands_with_its_type(app_client: httpx.AsyncClient) -> None:
    scraped = (await app_client.get("/metrics")).text
    served = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    rows = table("Metric", "Type", "Labels", "Meaning")

    assert {name(row[0]): row[1] for row in rows} == served
    assert len(rows) == len(served)


def test_every_counter_of_the_loop_stands_with_its_label() -> None:
    labels = {name(row[0]): names(row[2])[:1] for row in table("Metric", "Type", "Labels")}

    for counter in COUNTERS:
        assert labels[f"conveyor_{counter}_total"] == []
    for counter, (_text, label) in LABELLED_COUNTERS.items():
        assert labels[f"conveyor_{counter}_total"] == [label]


# -- the command line --


def _commands() -> dict[str, click.Command]:
    return {**_group("conveyor", cli.conveyor), "conveyor-dev": cli.conveyor_dev}


def _group(program: str, command: click.Command) -> dict[str, click.Command]:
    """A command, and all those below it."""
    found = {program: command}
    if isinstance(command, click.Group):
        for word, below in command.commands.items():
            found |= _group(f"{program} {word}", below)
    return found


def _flags(program: str, command: click.Command) -> set[str]:
    options = {
        flag
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    return options if " " in program else options | {"-h", "--help"}


def test_every_command_stands_with_its_flags() -> None:
    rows = table("Command", "Flags", "Does")

    assert {name(row[0]): once(names(row[1])) for row in rows} == {
        program: _flags(program, command) for program, command in _commands().items()
    }


def test_the_exit_codes_are_those_of_the_programs() -> None:
    from conveyor.client.commands import INCOMPLETE, SUCCEEDED

    codes = [int(row[0]) for row in table("Exit code", "Meaning")]

    assert codes == sorted(
        {SUCCEEDED, INCOMPLETE, cli.FAILED, cli.INTERRUPTED, click.UsageError.exit_code}
    )


# -- the rest --


def test_every_dependency_stands_with_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[<>=!~;\[ ]", line)[0] for line in project["dependencies"]}
    rows = table("Package", "Why")

    assert once(name(row[0]) for row in rows) == required
    assert all(row[1] for row in rows)
    extras = {
        extra: {re.split(r"[<>=!~;\[ ]", line)[0] for line in lines}
        for extra, lines in project["optional-dependencies"].items()
        if extra != "dev"
    }
    told = set(names(section("17. Dependencies")))
    assert extras.keys() | set().union(*extras.values()) <= told


def _room(path: Path) -> str:
    return path.relative_to(ROOT / "conveyor").parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """The rooms that a module imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if module.startswith("conveyor."):
                yield module.split(".")[1]


def test_every_room_stands_with_what_it_imports() -> None:
    told = {name(row[0]): set(names(row[2])) for row in table("Room", "Holds", "May import")}
    found: dict[str, set[str]] = {}
    for path in files_below(ROOT / "conveyor", ".py"):
        room = _room(path)
        if not room.startswith("__"):
            found.setdefault(room, set()).update(set(_imports(path)) - {room})

    assert found.keys() == told.keys()
    assert not {room: more for room in found if (more := found[room] - told[room])}


def _tests_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


@pytest.mark.slow
def test_the_tests_that_prove_the_guarantees_exist() -> None:
    cited = [
        reference.partition("::")
        for row in (*table("Guarantee", "Test"), *table("On AWS alone", "Handling is tested by"))
        for reference in names(row[1])
    ]
    missing = [
        f"{file}::{test}"
        for file, _, test in cited
        if not (ROOT / file).is_file() or (test and test not in _tests_in(ROOT / file))
    ]

    assert not missing


def test_every_guarantee_is_proved() -> None:
    promised = {row[0] for row in table("#", "Guarantee")}
    proved = {row[0].split()[0] for row in table("Guarantee", "Test") if names(row[1])}

    assert promised <= proved
