"""The preview of a schedule over the API."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import tzdata

from tests.unit.http_api import open_api

PREVIEW = "/v1/schedule/preview"


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


async def test_the_next_ten_fires_are_shown_with_what_the_clock_does(tmp_path: Path) -> None:
    calendar = {"times_of_day": ["02:00"], "cadence": {"daily": {}}}
    async with open_api(tmp_path) as api:
        begin = datetime(2_027, 3, 20, tzinfo=UTC).timestamp() - api.clock.now() / 1_000
        await api.clock.advance(begin)
        response = await api.client.post(
            PREVIEW, json={"calendar": calendar, "timezone": "Europe/Berlin"}
        )
    shown = response.json()

    assert response.status_code == 200, response.text
    assert shown["zones_version"] == tzdata.IANA_VERSION
    assert len(shown["fires"]) == 10
    assert shown["fires"][8] == {
        "at": "2027-03-28T01:00:00.000Z",
        "local_time": "2027-03-28T03:00:00+02:00",
        "note": "02:00 does not exist on this day: it fires at 03:00",
    }
    assert [fire for fire in shown["fires"] if "note" in fire] == [shown["fires"][8]]


async def test_a_rate_begins_now_and_a_single_time_ends_after_itself(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        now = api.clock.now()
        rate = await api.client.post(PREVIEW, json={"rate": {"every": 90, "unit": "minute"}})
        once = {"at": "2999-09-01T09:00", "timezone": "Europe/Berlin"}
        single = (await api.client.post(PREVIEW, json=once)).json()

    first = datetime.fromisoformat(rate.json()["fires"][0]["at"]).timestamp()
    assert first == (now + 5_400_000) // 1_000
    assert [fire["local_time"] for fire in single["fires"]] == ["2999-09-01T09:00:00+02:00"]


@pytest.mark.parametrize(
    ("document", "detail"),
    [
        ({}, "schedule: needs exactly one"),
        ({"at": "2001-09-01T09:00", "timezone": "UTC"}, "schedule.at: has passed"),
        (
            {"rate": {"every": 1, "unit": "day"}, "overlap": "both"},
            "schedule.overlap: must be skip or wait",
        ),
        ({"at": "2999-09-01T09:00", "timezone": "../etc"}, "schedule.timezone: must be"),
        (
            {"at": "9999-12-31T23:59", "timezone": "America/New_York"},
            "schedule.at: must lie before",
        ),
        ({"rate": {"every": 0, "unit": "day"}}, "schedule.rate.every: must be"),
    ],
)
async def test_what_is_refused_names_the_field(
    tmp_path: Path, document: object, detail: str
) -> None:
    async with open_api(tmp_path) as api:
        response = await api.client.post(PREVIEW, json=document)
        assert (await api.bare.post(PREVIEW, json=document)).status_code == 401

    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")
    assert response.json()["detail"].startswith(detail)


async def test_a_body_that_would_hold_up_others_is_refused(tmp_path: Path) -> None:
    cadence = {"monthly": {"days": [1] * 40_000}}
    calendar = {"times_of_day": ["02:00"], "cadence": cadence}
    async with open_api(tmp_path) as api:
        response = await api.client.post(PREVIEW, json={"calendar": calendar, "timezone": "UTC"})

    assert (response.status_code, response.json()["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize("at", ["0001-01-01T00:00", "1969-12-31T23:00", "9998-12-31T23:59"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "Etc/GMT-14", "America/New_York", "Etc/GMT+12"])
async def test_no_year_breaks_the_preview(tmp_path: Path, at: str, zone: str) -> None:
    async with open_api(tmp_path) as api:
        response = await api.client.post(PREVIEW, json={"at": at, "timezone": zone})

    assert response.status_code == (200 if at.startswith("9998") else 400), response.text
