"""/_dev/clock: moves over HTTP, what bad input gets, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.routes_dev import duration
from conveyor.roles.dev import ClockChoice, ServerChoices, run
from conveyor.settings import load
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.patient import SECONDS

START = "2027-03-01T00:00:00Z"


@pytest.fixture(scope="module", params=["manual", "system"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConveyorServer]:
    """A server on each clock."""
    words = {"clock": "manual", "clock_start": START} if request.param == "manual" else {}
    with conveyor_server(tmp_path_factory.mktemp("data"), **words) as booted:
        yield booted


@pytest.fixture
def client(server: ConveyorServer) -> Iterator[httpx.Client]:
    """A client that has the token."""
    origin = server.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {server.dev_token}"}
    with httpx.Client(base_url=f"{origin}/_dev", headers=headers, timeout=30) as opened:
        yield opened


def _mode(client: httpx.Client) -> str:
    mode: str = client.get("/clock").json()["mode"]
    return mode


def test_a_move_answers_with_the_state_of_the_clock(client: httpx.Client) -> None:
    before = client.get("/clock").json()
    answer = client.post("/clock", json={"advance": "2h"})
    if before["mode"] == "system":
        assert answer.status_code == 400
        assert "--clock manual" in answer.json()["detail"]
        return
    assert answer.status_code == 200, answer.text
    after = answer.json()
    assert after.keys() == before.keys() == {"mode", "now", "next", "waits", "wakes"}
    assert int(after["now"][11:13]) == int(before["now"][11:13]) + 2
    assert after["waits"]["open"] == {}
    for move in ({"shift": "-30m"}, {"set": "2027-03-05T00:00:00Z"}, {"run": "idle"}):
        assert client.post("/clock", json=move).status_code == 200
    assert client.get("/clock").json()["now"].startswith("2027-03-05T00:00:00")


@pytest.mark.parametrize(
    "move",
    [
        {"advance": "-1s"},
        {"advance": -1},
        {"advance": "401d"},
        {"advance": 1e300},
        {"advance": True},
        {"advance": "2 hours"},
        {"advance": ""},
        {"advance": "٣h"},
        {"advance": None},
        {"set": "2027-03-01"},
        {"set": "1999-01-01T00:00:00Z"},
        {"set": "9999-01-01T00:00:00Z"},
        {"set": 5},
        {"shift": "-500d"},
        {"run": "away"},
        {"fly": "2h"},
        {"advance": "1h", "set": START},
        {},
        [],
        "2h",
    ],
)
def test_bad_input_is_told_and_moves_nothing(client: httpx.Client, move: Any) -> None:
    before = client.get("/clock").json()["now"]
    answer = client.post("/clock", json=move)
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_argument"
    if _mode(client) == "manual":
        assert client.get("/clock").json()["now"] == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Host": "conveyor.example"}, 403),
        ({"Origin": "http://page.example"}, 403),
        ({"Forwarded": "for=1.2.3.4"}, 403),
        ({"X-Forwarded-For": "1.2.3.4"}, 403),
        ({"X-Forwarded-Host": "conveyor.example"}, 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_others_are_refused_and_move_nothing(
    client: httpx.Client, method: str, headers: dict[str, str], status: int
) -> None:
    before = client.get("/clock").json()["now"]
    body = None if method == "GET" else {"advance": "1h"}
    answer = client.request(method, "/clock", json=body, headers=headers)
    assert answer.status_code == status
    if _mode(client) == "manual":
        assert client.get("/clock").json()["now"] == before


def test_a_host_that_is_allowed_for_the_api_is_not_for_the_clock(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, allowed_hosts="conveyor.example") as booted:
        url = booted.base_url.removesuffix("/v1") + "/_dev/clock"
        headers = {"Authorization": f"Bearer {booted.dev_token}", "Host": "conveyor.example"}
        assert httpx.get(url, headers=headers, timeout=SECONDS).status_code == 403


def _submit(server: ConveyorServer) -> str:
    headers = {"X-API-Key": server.api_key}
    body = {"tasks": [{"url": server.url("page")}]}
    url = f"{server.base_url}/jobs"
    answer = httpx.post(url, json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code in (201, 202), answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


@pytest.mark.slow
def test_time_never_goes_back_where_another_clock_wrote(tmp_path: Path) -> None:
    with conveyor_server(tmp_path) as booted:
        first = _submit(booted)
        booted.drain()
    with (
        pytest.raises(ConveyorError, match="--clock-start is for a new data directory"),
        conveyor_server(tmp_path, clock="manual", clock_start="2020-01-01T00:00:00Z"),
    ):
        pass
    with conveyor_server(tmp_path, clock="manual") as booted:
        assert _submit(booted) > first
        booted.clock.advance(days=3)
        second = _submit(booted)
        booted.clock.advance()
    (tmp_path / "clock").write_text('{"now": 1600000000000, "last_id": "0", "boots": 0}')
    with conveyor_server(tmp_path, clock="manual", clock_start=START) as booted:
        assert _submit(booted) > second


@pytest.mark.slow
def test_an_instant_without_a_zone_is_refused_as_documented(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, clock="manual", clock_start=START) as booted:
        for instant in (datetime(2028, 1, 1), "2028-01-01T00:00:00", "noon"):
            with pytest.raises(ConveyorError, match="with a zone") as caught:
                booted.clock.set(instant)
            assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "choice",
    [
        ClockChoice("bogus"),
        ClockChoice("manual", "1960-01-01T00:00:00Z"),
        ClockChoice("manual", "9999-12-02T00:00:00Z"),
    ],
)
def test_a_clock_that_cannot_be_is_refused(choice: ClockChoice) -> None:
    with pytest.raises(ConveyorError) as caught:
        choice.make()
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_a_clock_that_nobody_could_move_is_refused(tmp_path: Path, mode: str) -> None:
    settings = load({}, data_dir=str(tmp_path), host="0.0.0.0", port=0)
    with pytest.raises(ConveyorError, match="loopback"):
        run(settings, ServerChoices(ClockChoice(mode)), on_ready=lambda _: None)


def test_a_server_beyond_loopback_has_no_such_path(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, host="0.0.0.0") as booted:
        assert booted.dev_token == ""
        origin = booted.base_url.removesuffix("/v1")
        assert httpx.get(f"{origin}/_dev/clock", timeout=SECONDS).status_code == 404


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2h", 7_200.0), ("1d12h", 129_600.0), ("250ms", 0.25), ("-90s", -90.0), (5, 5.0), (1.5, 1.5)],
)
def test_durations(value: object, seconds: float) -> None:
    assert duration("advance", value) == seconds
