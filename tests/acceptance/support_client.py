"""The public client over a booted server, and the few steps that most of its tests take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch import BatchAPIError, ZenRowsBatchClient
from zenrows.batch._resources import JobRef
from zenrows.batch._typed_dicts import AddTasksDict, TaskInputDict
from zenrows.batch.errors import BatchErrorCode
from zenrows.batch.models import RunStatus, TaskResult

from tests.acceptance import support_models
from tests.acceptance.support_bindings import Serving
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import KEY
from tests.acceptance.support_wire import target

OPEN_JOB_TASKS = 160
LARGE_FROM = 130
"""Tasks from which a submit to a fleet is large."""
FLEET_SETTINGS: dict[str, Any] = {
    "retry_base": 0.01,
    "max_open_job_tasks": OPEN_JOB_TASKS,
    "async_threshold": LARGE_FROM,
    "visibility_timeout": 5,
    "heartbeat": 1,
    "permit_lease": 5,
    "sweep_interval": 5,
}
"""Settings of a fleet that is to pass the tests of the public client."""
NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"

Tasks = list[str | TaskInputDict]


@contextmanager
def client_server(directory: Path) -> Iterator[Booted]:
    """A server over the fake gateway that scrubs what is deleted within seconds."""
    with boot(
        directory,
        *("--gateway", "fake", "--workers", "200"),
        retry_base=0.01,
        max_open_job_tasks=OPEN_JOB_TASKS,
        visibility_timeout=2,
        heartbeat=0.5,
        shutdown_grace=0.1,
    ) as server:
        yield server


def open_client(server: Serving, key: str = KEY) -> ZenRowsBatchClient:
    """A client whose every answer is held against the models."""
    hooks = {"response": [support_models.check]}
    return ZenRowsBatchClient(key, base_url=server.api, httpx_args={"event_hooks": hooks})


def pages(count: int, name: str = "page", **behaviour: float | str) -> Tasks:
    """Return `count` URLs that the fake gateway answers as the keywords say."""
    return [target(f"{name}/{number}", **behaviour) for number in range(count)]


def added(tasks: Tasks, *, last_batch: bool = False) -> AddTasksDict:
    """Return the arguments of add_tasks."""
    listed = [TaskInputDict(url=task) if isinstance(task, str) else task for task in tasks]
    return AddTasksDict(tasks=listed, last_batch=last_batch)


def finish(job: JobRef) -> None:
    """Wait for a job's latest run with the client's own waiter."""
    run = job.run.wait(timeout=60, poll_interval=0.05)
    assert run.status is RunStatus.COMPLETED


def urls(rows: Iterable[TaskResult]) -> list[str]:
    """The URLs of rows."""
    return [str(row.url) for row in rows]


def refused(code: BatchErrorCode, status: int, act: Callable[[], object]) -> BatchAPIError:
    """Return the error that an operation raises, after checking that it is this refusal."""
    with pytest.raises(BatchAPIError) as caught:
        act()
    error = caught.value
    assert (error.code, error.status_code) == (code, status)
    assert error.problem is not None
    assert error.problem.status == status
    assert error.detail
    return error
