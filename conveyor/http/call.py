"""One authenticated request: its caller, the ids in its path, its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conveyor.domain import ids
from conveyor.domain.errors import not_found
from conveyor.service.callers import Caller
from conveyor.service.service import Service
from conveyor.service.wire import encode


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler gets. The ids raise ConveyorError(not_found) where they cannot be ids."""

    request: Request
    service: Service
    caller: Caller

    @property
    def caller_id(self) -> str:
        """The id of the caller."""
        return self.caller.caller_id

    @property
    def job_id(self) -> str:
        """The job in the path."""
        return self._ulid("job_id", "job")

    @property
    def run_id(self) -> str | None:
        """The run in the path; None where the path has none, which means the latest."""
        return self._ulid("run_id", "run") if "run_id" in self.request.path_params else None

    @property
    def named_run_id(self) -> str:
        """The run in a path that always has one."""
        return self._ulid("run_id", "run")

    @property
    def task_id(self) -> str:
        """The task in the path."""
        task_id: str = self.request.path_params["task_id"]
        if not ids.is_task_id(task_id):
            raise not_found("task")
        return task_id

    def _ulid(self, parameter: str, what: str) -> str:
        value: str = self.request.path_params[parameter]
        if not ids.is_ulid(value):
            raise not_found(what)
        return value


Handler = Callable[[Call], Awaitable[Response]]


def json_response(body: msgspec.Struct, *, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(encode(body), status_code=status, media_type="application/json")
