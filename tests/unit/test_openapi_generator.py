"""A generator of clients over our OpenAPI document: it makes the whole, and that works."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from conveyor.testing.local_server import ConveyorServer
from tests.unit.http_api import DOCUMENT

pytestmark = [pytest.mark.extended, pytest.mark.slow]

PACKAGE = "generated_conveyor_client"
# The upload takes application/octet-stream beside them, which the generator knows.
UNKNOWN_TYPES = {"text/csv", "application/x-ndjson", "text/plain"}
IDS = [
    operation["operationId"]
    for methods in DOCUMENT["paths"].values()
    for operation in methods.values()
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The output of the generator, whose package can be imported meanwhile."""
    directory = tmp_path_factory.mktemp("generated")
    (directory / "openapi.json").write_text(json.dumps(DOCUMENT))
    (directory / "config.json").write_text(json.dumps({"post_hooks": []}))
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"]
    command += ["--path", "openapi.json", "--config", "config.json", "--output-path", PACKAGE]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(directory))
    yield done.stdout + done.stderr
    sys.path.remove(str(directory))


def part(name: str) -> Any:
    """A module of the generated package."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def snake(name: str) -> str:
    """The name of the generated module of an operation."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def test_nothing_is_left_out(said: str) -> None:
    models = part("models")

    assert set(re.findall(r"Unsupported content type (\S+)", said)) == UNKNOWN_TYPES
    assert said.count("WARNING") == len(UNKNOWN_TYPES), said
    assert not re.search("Unable|will not be generated|will be omitted|removal", said)
    for operation in IDS:
        assert part(f"api.default.{snake(operation)}").sync_detailed
    for name, schema in DOCUMENT["components"]["schemas"].items():
        if schema.get("type") == "object":
            fields = getattr(models, name).__annotations__
            assert len(fields) >= len(schema.get("properties", {})), name


def test_the_generated_client_works(said: str, conveyor_server: ConveyorServer) -> None:
    client = part("client").AuthenticatedClient(
        base_url=conveyor_server.base_url.removesuffix("/v1"),
        token=conveyor_server.api_key,
        prefix="",
        auth_header_name="X-API-Key",
    )

    with client:
        use(client, conveyor_server)


def use(client: Any, conveyor_server: ConveyorServer) -> None:
    """Submit, add, read and upload through the generated client."""
    models = part("models")

    def call(operation: str, *path: str, **given: Any) -> Any:
        answer = part(f"api.default.{operation}").sync(*path, client=client, **given)
        assert not isinstance(answer, models.Problem), answer
        return answer

    def task(path: str) -> Any:
        return models.Task(url=conveyor_server.url(path), zenrows_params=params)

    params = models.Params(js_render=1, response_type="html")
    opened = call("submit_job", body=models.SubmitJob(status="open", tasks=[task("a")]))
    added = models.AddTasks(tasks=[task("b")], last_batch=True)
    assert call("add_tasks", opened.job_id, body=added).job_status == "closed"
    conveyor_server.drain()
    run = call("get_job", opened.job_id).latest_run
    assert (run.status, run.stats.successful) == ("completed", 2)
    [first, _] = call("list_latest_run_results", opened.job_id).results
    assert call("get_latest_run_task_content", opened.job_id, first.task_id).payload.read()

    slot = call("create_job_input", body=models.CreateJobInput(models.CreateJobInputType.URLS))
    link = dict(parse_qsl(urlsplit(slot.upload.url).query))
    file = part("types").File(payload=BytesIO(conveyor_server.url("c").encode()))
    call("upload_job_input", slot.file_input_id, body=file, **link)
    made = call("submit_job", body=models.SubmitJob(file_input_id=slot.file_input_id))
    assert made.accepted_tasks == 1
    conveyor_server.drain()
