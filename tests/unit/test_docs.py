"""The code's descriptions against the behaviour of its programs, and the documents against both."""

from __future__ import annotations

import copy
import re
import runpy
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from reference.source import texts_of

from conveyor.bootstrap import open_dev
from conveyor.client import program
from conveyor.clock import SystemClock
from conveyor.domain.errors import ErrorCode, InvalidTaskReason
from conveyor.engine.telemetry import METRICS
from conveyor.http.openapi import document, operations
from conveyor.http.openapi_schemas import ANSWERS
from conveyor.http.problems import PROBLEMS
from conveyor.service import schemas
from conveyor.settings import PREFIX, SETTINGS, load
from tests.unit.metrics_page import described_metrics, served_metrics
from tests.unit.spec_document import ROOT, SPEC, differences

CLIENT_VARIABLES = {"CONVEYOR_URL", "CONVEYOR_DEV_URL", "CONVEYOR_DEV_TOKEN"}
TEST_VARIABLES = {"CONVEYOR_TEST_AWS", "CONVEYOR_TEST_REDIS_SERVER"}
EMULATORS = ROOT / "scripts" / "emulators.d" / "programs.py"
DOCUMENTS = [ROOT / name for name in ("README.md", "SPEC.md", "CONTRIBUTING.md", "bench/README.md")]


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


# -- settings --


def test_no_variable_is_named_that_nothing_reads() -> None:
    known = {setting.variable for setting in SETTINGS} | CLIENT_VARIABLES
    files = {setting.file_variable for setting in SETTINGS if setting.secret}
    variables = set(re.findall(rf"\b{PREFIX}[A-Z0-9_]+\b", SPEC))

    told = variables & (known | files | _of_tests())
    assert not differences("SPEC.md, its variables", variables, told)


def test_every_variable_of_the_tests_stands() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")

    told = set(re.findall(rf"\b{PREFIX}TEST_[A-Z0-9_]+\b", page))
    assert not differences("docs/reference/settings.md", told, _of_tests())


def _of_tests() -> set[str]:
    """The variables that tests read: one for each service that an emulator stands for."""
    emulators = runpy.run_path(str(EMULATORS), run_name="programs")["emulators"](Path())
    services = {service for emulator in emulators for service in emulator.addresses}
    return {f"{PREFIX}TEST_{service}" for service in services} | TEST_VARIABLES


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


def described_routes() -> set[tuple[str, str]]:
    routes = [(operation.method.upper(), operation.path) for operation in operations()]
    assert len(routes) == len(set(routes))
    return set(routes)


PAGES = frozenset({"/", "/docs"})
"""Pages for people; the document is for programs."""
FOR_PEOPLE = ("/_dev/", "/dashboard")
"""The inbox of a development server, which docs/webhooks.md describes, and further pages."""


async def test_every_route_that_is_served_is_an_operation(app_client: httpx.AsyncClient) -> None:
    app = app_client._transport.app  # type: ignore[attr-defined]
    served = {
        f"{method} {route.path}"
        for route in app.routes
        for method in route.methods
        if method != "HEAD" and not route.path.startswith(FOR_PEOPLE)
    }
    described = {f"{method} {path}" for method, path in described_routes()}
    described |= {f"GET {path}" for path in PAGES}

    where = "operations() of conveyor/http/openapi_operations.py"
    assert not differences(where, described, served)


async def test_no_route_answers_501(app_client: httpx.AsyncClient) -> None:
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
        "delivery_id": job["job_id"],
    }
    for method, path in sorted(described_routes() - {("DELETE", "/v1/jobs/{job_id}")}):
        # A stream has no end.
        asked = "HEAD" if path.endswith("/events") else method
        answer = await app_client.request(asked, path.format(**ids), headers=headers)
        assert answer.status_code != 501, path


def test_every_error_code_has_a_status_and_a_meaning() -> None:
    assert not differences("PROBLEMS of conveyor/http/problems.py", PROBLEMS, set(ErrorCode))
    for kind in (ErrorCode, InvalidTaskReason):
        where = f"the texts below the members of {kind.__name__} in conveyor/domain/errors.py"
        assert not differences(where, texts_of(kind).keys(), kind.__members__.keys())


def test_every_field_of_every_answer_is_described() -> None:
    answers = {
        value
        for value in vars(schemas).values()
        if isinstance(value, type) and value.__module__ == schemas.__name__
    }
    described = copy.deepcopy(document()["components"]["schemas"])

    listed = {answer.__name__ for answer in ANSWERS.values()}
    expected = {answer.__name__ for answer in answers}
    assert not differences("ANSWERS of conveyor/http/openapi_schemas.py", listed, expected)
    # Only the problem of a request has invalid tasks, not that of a task.
    del described["Problem"]["properties"]["invalid_tasks"]
    for name, shape in ANSWERS.items():
        where = f"{name} of conveyor/http/openapi_schemas.py"
        told = described[name]["properties"].keys()
        assert not differences(where, told, shape.__struct_fields__)


# -- metrics --


async def test_every_metric_is_served_as_it_is_described(app_client: httpx.AsyncClient) -> None:
    page = (await app_client.get("/metrics")).text

    assert served_metrics(page) == described_metrics("conveyor-dev")


def test_every_metric_explains_itself() -> None:
    assert all(one.help == one.help.strip() != "" for one in METRICS.values())


# -- the command line --


def test_the_exit_codes_are_those_of_the_programs() -> None:
    codes = {program.SUCCEEDED, program.INCOMPLETE, program.FAILED, program.INTERRUPTED}

    assert list(program.EXIT_CODES) == sorted({*codes, click.UsageError.exit_code})


# -- the rest --


def test_a_missing_row_is_named_with_its_file() -> None:
    told, right = {"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5}

    assert differences("SPEC.md, limits", told, right) == [
        "SPEC.md, limits: there is no row for d",
        "SPEC.md, limits: the row for a belongs to nothing",
        "SPEC.md, limits: the row for c says 3, where 4 is right",
    ]
    assert differences("SPEC.md", ["a"], {"a"}) == []


def test_no_package_is_under_the_gpl() -> None:
    """The programs and their tests can be handed on as the licence of this project says."""
    pinned = (ROOT / "constraints.lock").read_text(encoding="utf-8").split()
    packages = [line.partition("==")[0] for line in pinned]
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):  # for another version of Python, or another system
            about = metadata(package)
            told = about.get_all("Classifier", []) + about.get_all("License-Expression", [])
            texts = about.get_all("License", [])
            found[package] = [*told, *(text.partition("\n")[0] for text in texts)]

    assert len(found) > 0.9 * len(packages)
    assert not [
        package
        for package, told in found.items()
        if re.search(r"\bA?GPL|GNU (Affero )?General Public", " ".join(told))
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_cites_is_there(path: Path) -> None:
    cited = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text(encoding="utf-8"))
    missing = [
        f"{file}::{test}"
        for file, test in cited
        if not (ROOT / file).is_file()
        or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"))
    ]

    assert not missing
