"""Routes below /_dev that tests use: they move the clock of a development server, and empty it.

They serve programs of this machine alone, and of them only those that have the server's token.
"""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Awaitable, Callable
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import parse_rfc3339, quoted, rfc3339
from conveyor.http.middleware import DEV_PATH, is_loopback
from conveyor.http.request import json_response, read_small_body
from conveyor.ports.idle import ClockControl, ClockState

CLOCK_PATH = f"{DEV_PATH}/clock"
RESET_PATH = f"{DEV_PATH}/reset"
CONFIRMATION = {"confirm": "data"}
"""The body of a request that destroys data."""
TOKEN_BYTES = 16
"""Random bytes of the token: 128 bits."""
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"(-?)((?:\d{1,9}(?:\.\d{1,9})?(?:ms|[smhdw]))+)", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_MOVES = ("advance", "set", "shift", "run")


class NextDueBody(msgspec.Struct, frozen=True):
    """The next thing due: its instant, the seconds until then, and its kind."""

    at: str
    seconds: float
    what: str


class ClockWaits(msgspec.Struct, frozen=True):
    """All that waits: sleeps, loops that look now and then, and open work by kind."""

    sleeps: int
    looks: int
    open: dict[str, int]


class ClockBody(msgspec.Struct, frozen=True):
    """The state of a server's clock. `wakes` counts what it has woken."""

    mode: str
    now: str
    next: NextDueBody | None
    waits: ClockWaits
    wakes: int


class Bench:
    """The routes, guarded by a token, over what moves the server. `empty` removes all of its data
    but secrets and keys."""

    def __init__(
        self, clock: ClockControl, token: str, empty: Callable[[], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._token = token
        self._empty = empty

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(CLOCK_PATH, self._serve_clock, methods=["GET", "POST"]),
            Route(RESET_PATH, self._reset, methods=["POST"]),
        ]

    async def _reset(self, request: Request) -> Response:
        self._check(request)
        if strict_json.decode(await read_small_body(request)) != CONFIRMATION:
            _refuse('this removes all data of the server: send {"confirm": "data"}')
        await self._empty()
        return Response(status_code=204)

    async def _serve_clock(self, request: Request) -> Response:
        self._check(request)
        if request.method == "POST":
            await self._move(await read_small_body(request))
        return json_response(clock_body(await self._clock.state()))

    def _check(self, request: Request) -> None:
        check_local(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), self._token.encode())
        if scheme.lower() != "bearer" or not self._token or not is_right:
            raise ConveyorError(
                ErrorCode.UNAUTHENTICATED,
                f"{DEV_PATH} wants the token that `conveyor-dev --json` prints: "
                "Authorization: Bearer TOKEN",
            )

    async def _move(self, body: bytes) -> None:
        document = strict_json.decode(body)
        if not isinstance(document, dict) or len(document) != 1:
            _refuse(f"send one of {', '.join(_MOVES)}")
        [(move, value)] = document.items()
        if move == "advance":
            await self._clock.advance(duration(move, value))
        elif move == "shift":
            await self._clock.shift_wall(duration(move, value))
        elif move == "set":
            await self._clock.advance_to(_instant(value))
        elif move == "run" and value == "idle":
            await self._clock.run_until_idle()
        elif move == "run":
            _refuse("run takes the word idle")
        else:
            _refuse(f"{quoted(move)} is none of {', '.join(_MOVES)}")


def check_local(request: Request) -> None:
    """Let through what a program of this machine sent itself. Raises
    ConveyorError(permission_denied)."""
    hosts = request.headers.getlist("Host")
    forwarded = [
        name for name in request.headers if name == "forwarded" or name.startswith("x-forwarded-")
    ]
    peer = request.client
    is_named = len(hosts) == 1 and is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")
    if peer is None or not is_loopback(peer.host) or not is_named or forwarded:
        raise ConveyorError(
            ErrorCode.PERMISSION_DENIED,
            f"{DEV_PATH} answers programs of this machine alone, under a name of its loopback",
        )


def duration(name: str, value: object) -> float:
    """Read a duration in seconds: a number of them, or a text such as 2h or 1d12h. Raises
    ConveyorError(invalid_argument)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        _refuse(f"{name} takes seconds, or a duration such as 90s, 2h or 1d12h")
    seconds = sum(float(count) * UNITS[unit] for count, unit in _PART.findall(found[2]))
    return -seconds if found[1] else seconds


def clock_body(state: ClockState) -> ClockBody:
    """Show the state of a clock."""
    due = state.next
    shown = None
    if due is not None:
        after = max(due.after, 0.0)
        at = rfc3339(state.now + round(after * 1_000))
        shown = NextDueBody(at=at, seconds=round(after, 3), what=due.what)
    waits = ClockWaits(sleeps=state.sleeps, looks=state.looks, open=dict(state.open))
    return ClockBody(state.mode, rfc3339(state.now), shown, waits, state.wakes)


def _instant(value: object) -> int:
    try:
        return parse_rfc3339(value) if isinstance(value, str) else _refuse_instant()
    except (ValueError, msgspec.ValidationError):
        _refuse_instant()


def _refuse_instant() -> NoReturn:
    _refuse("set takes an instant with a zone, such as 2027-03-28T00:59:00Z")


def _refuse(detail: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail)
