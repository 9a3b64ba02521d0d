"""The model of the public client that each answer must parse in, by method and path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import httpx
from pydantic import BaseModel
from zenrows.batch import models
from zenrows.batch._open_enum import is_unknown

_ID = "[0-9A-Z]{26}"
_JOB = f"/v1/jobs/{_ID}"
_RUN = f"{_JOB}/runs/{_ID}"

MODELS: dict[tuple[str, str], type[BaseModel] | None] = {
    ("POST", "/v1/jobs"): models.SubmitJobResponse,
    ("GET", "/v1/jobs"): models.ListJobsResponse,
    ("POST", "/v1/job_inputs"): models.CreateJobInputResponse,
    ("GET", _JOB): models.Job,
    ("DELETE", _JOB): None,
    ("POST", f"{_JOB}/tasks"): models.AddTasksResponse,
    ("POST", f"{_JOB}/close"): models.Job,
    ("POST", f"{_JOB}/stop"): models.Run,
    ("POST", f"{_JOB}/cancel"): models.Run,
    ("POST", f"{_JOB}/pause"): models.Run,
    ("POST", f"{_JOB}/resume"): models.Run,
    ("POST", f"{_JOB}/rerun"): models.RerunJobResponse,
    ("PUT", f"{_JOB}/schedule"): models.Job,
    ("POST", f"{_JOB}/schedule/state"): models.Job,
    ("GET", f"{_JOB}/runs"): models.ListJobRunsResponse,
    ("GET", _RUN): models.Run,
    ("DELETE", _RUN): None,
    ("POST", f"{_RUN}/exports"): models.StartExportResponse,
    ("GET", f"{_RUN}/exports/{_ID}"): models.Export,
    ("GET", f"{_JOB}/results"): models.ListResultsResponse,
    ("GET", f"{_RUN}/results"): models.ListResultsResponse,
    ("GET", f"{_JOB}/tasks/{_ID}/history"): models.TaskHistoryResponse,
    ("GET", f"{_RUN}/tasks/{_ID}/history"): models.TaskHistoryResponse,
    ("GET", "/v1/hmac/keys"): models.HMACKeyList,
    ("POST", "/v1/hmac/keys/rotate"): models.HMACKeyCreated,
    ("DELETE", "/v1/hmac/keys/rotate"): None,
    ("POST", "/v1/hmac/keys/rotate/finalize"): models.HMACKeyFinalized,
    ("GET", f"{_JOB}/webhook"): models.WebhookConfig,
    ("PUT", f"{_JOB}/webhook"): models.WebhookConfig,
    ("DELETE", f"{_JOB}/webhook"): None,
    ("POST", "/v1/webhook/test"): models.TestWebhookResponse,
}
"""The form of a success; None where it has no body."""


def check(response: httpx.Response) -> None:
    """Hold an answer of the API against its model: nothing is coerced, no word is unknown.

    Fit for a client's event hooks. Raises AssertionError, or pydantic's ValidationError.
    """
    response.read()
    assert response.headers["X-Request-ID"]
    if response.is_error:
        assert response.headers["Content-Type"] == "application/problem+json"
        _parse(models.Problem, response.content)
        return
    model = MODELS[route_of(response.request)]
    if model is None:
        assert response.status_code in (202, 204)
        assert response.content == b""
    else:
        assert response.headers["Content-Type"] == "application/json"
        _parse(model, response.content)


def route_of(request: httpx.Request) -> tuple[str, str]:
    """The entry of MODELS that a request belongs to. Raises AssertionError where there is none."""
    for method, pattern in MODELS:
        if method == request.method and re.fullmatch(pattern, request.url.path):
            return method, pattern
    raise AssertionError(f"no model for {request.method} {request.url.path}")


def _parse(model: type[BaseModel], content: bytes) -> None:
    parsed = model.model_validate_json(content, strict=True)
    assert not [word for word in _enums(parsed) if is_unknown(word)], content
    nulls = [
        name for name, value in _members(parsed.model_dump(exclude_unset=True)) if value is None
    ]
    assert not nulls, f"null instead of being left out: {nulls}"


def _enums(value: object) -> Iterator[Enum]:
    if isinstance(value, Enum):
        yield value
    elif isinstance(value, BaseModel):
        for name in value.model_fields_set:
            yield from _enums(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _enums(item)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield name, member
            yield from _members(member)
    elif isinstance(value, list):
        for item in value:
            yield from _members(item)
