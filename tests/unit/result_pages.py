"""Results over HTTP, page after page."""

from __future__ import annotations

from zenrows.batch.models import ListResultsResponse, TaskResult

from tests.unit.http_api import Api


async def listed(api: Api, path: str, **params: str) -> list[TaskResult]:
    """Every result, page after page."""
    rows: list[TaskResult] = []
    cursor: str | None = None
    while True:
        query = params | ({"cursor": cursor} if cursor else {})
        response = await api.client.get(path, params=query)
        assert response.status_code == 200, response.text
        page = ListResultsResponse.model_validate(response.json())
        rows += page.results
        cursor = page.next_cursor
        if cursor is None:
            return rows
