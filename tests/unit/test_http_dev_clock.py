"""/_dev/clock: moves over HTTP, what bad input gets, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.http.routes_dev import duration
from conveyor.testing.server import ConveyorServer, conveyor_server

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
        assert httpx.get(url, headers=headers).status_code == 403


def test_a_server_beyond_loopback_has_no_such_path(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, host="0.0.0.0") as booted:
        assert booted.dev_token == ""
        origin = booted.base_url.removesuffix("/v1")
        assert httpx.get(f"{origin}/_dev/clock").status_code == 404


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2h", 7_200.0), ("1d12h", 129_600.0), ("250ms", 0.25), ("-90s", -90.0), (5, 5.0), (1.5, 1.5)],
)
def test_durations(value: object, seconds: float) -> None:
    assert duration("advance", value) == seconds
