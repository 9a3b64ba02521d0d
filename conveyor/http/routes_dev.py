"""Routes below /_dev that tests use: they move the clock of a development server, empty it, and
give its fake gateway rules.

They serve programs of this machine alone, and of them only those that have the server's token.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import parse_duration, parse_rfc3339, quoted, rfc3339
from conveyor.http.middleware import DEV_PATH, is_loopback
from conveyor.http.request import json_response, read_body, read_small_body
from conveyor.ports.gateway import GatewayControl
from conveyor.ports.idle import ClockControl, ClockState
from conveyor.ports.outbox import SentCallback
from conveyor.ports.recordings import RecordingControl
from conveyor.service.overview import Overviews

CLOCK_PATH = f"{DEV_PATH}/clock"
RUNS_PATH = f"{DEV_PATH}/runs"
RESET_PATH = f"{DEV_PATH}/reset"
CONFIRMATION = {"confirm": "data"}
"""The body of a request that destroys data."""
RULES_PATH = f"{DEV_PATH}/gateway/rules"
CALLS_PATH = f"{DEV_PATH}/gateway/requests"
RECORDING_PATH = f"{DEV_PATH}/gateway/recording"
CALLBACKS_PATH = f"{DEV_PATH}/callbacks"
MOST_RULES_BYTES = 1 << 20
_RULES_TYPES = {"application/toml": True, "application/json": False}
TOKEN_BYTES = 16
"""Random bytes of the token: 128 bits."""
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


class RecordBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recording to begin: into `record`, or out of `replay`, with what becomes of a call that it
    does not have."""

    record: str = ""
    replay: str = ""
    missing: str = "fail"


class CallbacksBody(msgspec.Struct, frozen=True):
    """The callbacks to state machines, oldest first."""

    callbacks: list[SentCallback]


class Bench:
    """The routes, guarded by a token, over what moves the server. `empty` removes all of its data
    but secrets and keys; `gateway` is there where rules can be given to it; `callbacks` returns
    what state machines would have been told."""

    def __init__(
        self,
        clock: ClockControl,
        token: str,
        empty: Callable[[], Awaitable[None]],
        gateway: GatewayControl | None,
        recording: RecordingControl,
        callbacks: Callable[[], Awaitable[list[SentCallback]]],
    ) -> None:
        self._clock = clock
        self._token = token
        self._empty = empty
        self._gateway = gateway
        self._recording = recording
        self._callbacks = callbacks

    def routes(self, overviews: Overviews) -> list[Route]:
        """Return the routes; `overviews` shows the runs of all callers."""

        async def runs(request: Request) -> Response:
            check_developer(request, self._token)
            return json_response(await overviews.all_runs())

        return [
            Route(CLOCK_PATH, self._serve_clock, methods=["GET", "POST"]),
            Route(RUNS_PATH, runs, methods=["GET"]),
            Route(RESET_PATH, self._reset, methods=["POST"]),
            Route(RULES_PATH, self._install_rules, methods=["PUT"]),
            Route(CALLS_PATH, self._serve_calls, methods=["GET", "DELETE"]),
            Route(RECORDING_PATH, self._serve_recording, methods=["GET", "PUT", "DELETE"]),
            Route(CALLBACKS_PATH, self._serve_callbacks, methods=["GET"]),
        ]

    async def _install_rules(self, request: Request) -> Response:
        gateway = self._ruled(request)
        media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if media_type not in _RULES_TYPES:
            detail = "send the rules as application/toml or application/json"
            raise ConveyorError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, detail)
        announced = request.headers.get("Content-Length", "0")
        if announced.isdecimal() and int(announced) > MOST_RULES_BYTES:
            _refuse_size()
        document = (await read_body(request)).joined()
        if len(document) > MOST_RULES_BYTES:
            _refuse_size()
        # A large document takes its time, in which the server answers others.
        install = partial(gateway.install, document, is_toml=_RULES_TYPES[media_type])
        await to_thread.run_sync(install)
        return Response(status_code=204)

    async def _serve_calls(self, request: Request) -> Response:
        gateway = self._ruled(request)
        if request.method in ("GET", "HEAD"):
            return json_response(gateway.calls())
        gateway.forget()
        return Response(status_code=204)

    def _ruled(self, request: Request) -> GatewayControl:
        check_developer(request, self._token)
        if self._gateway is None:
            _refuse("this server has no fake gateway: start it with --gateway fake")
        return self._gateway

    async def _serve_recording(self, request: Request) -> Response:
        check_developer(request, self._token)
        recording = self._recording
        if request.method in ("GET", "HEAD"):
            return json_response(recording.recording())
        if request.method == "DELETE":
            return json_response(await recording.end_recording())
        asked = _recording_body(await read_small_body(request))
        if asked.record:
            await recording.record(asked.record)
        else:
            await recording.replay(asked.replay, missing=asked.missing)
        return json_response(recording.recording())

    async def _serve_callbacks(self, request: Request) -> Response:
        check_developer(request, self._token)
        return json_response(CallbacksBody(await self._callbacks()))

    async def _reset(self, request: Request) -> Response:
        check_developer(request, self._token)
        if strict_json.decode(await read_small_body(request)) != CONFIRMATION:
            _refuse('this removes all data of the server: send {"confirm": "data"}')
        await self._empty()
        return Response(status_code=204)

    async def _serve_clock(self, request: Request) -> Response:
        check_developer(request, self._token)
        if request.method == "POST":
            await self._move(await read_small_body(request))
        return json_response(clock_body(await self._clock.state()))

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


def check_developer(request: Request, token: str) -> None:
    """Let through what a program of this machine sent itself, with the token of this server. Raises
    ConveyorError: permission_denied, unauthenticated."""
    check_local(request)
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not token or not is_right:
        raise ConveyorError(
            ErrorCode.UNAUTHENTICATED,
            f"{DEV_PATH} wants the token that `conveyor-dev --json` prints: "
            "Authorization: Bearer TOKEN",
        )


def duration(name: str, value: object) -> float:
    """Read a duration in seconds: a number of them, or a text such as 2h or 1d12h. Raises
    ConveyorError(invalid_argument)."""
    try:
        return parse_duration(value)
    except ValueError as error:
        _refuse(f"{name} {error}")


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


def _recording_body(body: bytes) -> RecordBody:
    try:
        asked = msgspec.convert(strict_json.decode(body), RecordBody)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    directory = f"{asked.record}{asked.replay}"
    if bool(asked.record) == bool(asked.replay) or not directory.isprintable():
        _refuse("send a directory as record or as replay")
    return asked


def _refuse_instant() -> NoReturn:
    _refuse("set takes an instant with a zone, such as 2027-03-28T00:59:00Z")


def _refuse_size() -> NoReturn:
    detail = f"rules may have at most {MOST_RULES_BYTES:,} bytes"
    raise ConveyorError(ErrorCode.PAYLOAD_TOO_LARGE, detail)


def _refuse(detail: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail)
