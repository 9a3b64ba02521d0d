"""Tries of calls to AWS over Conveyor's own HTTP client, and through boto3 for all other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.answers import ForeignAnswer
from conveyor.prod.aws.boto import BotoCarrier
from conveyor.prod.aws.calls import (
    MAY_BE_LEFT,
    Answer,
    AwsOptions,
    BodyGivenBack,
    Parameters,
)
from conveyor.prod.aws.carriers import NO_TURN, Unanswered, read_client_error
from conveyor.prod.aws.credentials import KeyHolder
from conveyor.prod.aws.places import CallPlace, CallPlaces, Unplaced
from conveyor.prod.aws.requests import OWN_CALLS, HttpRequest, Moved, OwnCall, read_answer
from conveyor.prod.aws.signer import SignedPart
from conveyor.wire import client as wire
from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import ClientOptions, Proxy

BODIES_OPEN = 256
"""Most bodies that are read at a time: each holds a connection until it is read to its end."""
BODY_KEPT = 30.0
"""Seconds without a reader after which a body gives its connection back: others wait for one, and
who reads on asks S3 for the rest."""
LARGE = 256 * 1024
"""Bytes of a body from which it is hashed in a thread, and for which a call gets a second more."""
_WORDS = {
    TransportTrouble.UNRESOLVED: "EndpointConnectionError",
    TransportTrouble.UNREACHABLE: "EndpointConnectionError",
    TransportTrouble.TLS: "SSLError",
    TransportTrouble.NO_COMMON_PROTOCOL: "SSLError",
    TransportTrouble.INTERRUPTED: "ConnectionClosedError",
    TransportTrouble.TRUNCATED: "ConnectionClosedError",
    TransportTrouble.RAGGED: "ConnectionClosedError",
    TransportTrouble.TIMEOUT: "ReadTimeoutError",
    TransportTrouble.MALFORMED: "ForeignAnswer",
}
"""The names that botocore has for the troubles of a transport."""


class CallLane:
    """The connections of one kind of call, and the turns of those that wait for one."""

    def __init__(self, client: HttpClient, turns: int) -> None:
        self.client = client
        self.turns = asyncio.Semaphore(turns)


class HttpCarrier:
    """A `Carrier` for the calls of `OWN_CALLS`, which hands all others to boto3's.

    Belongs to one event loop.
    """

    def __init__(
        self,
        boto: BotoCarrier,
        options: AwsOptions,
        clock: Clock,
        *,
        credentials: Credentials | None,
    ) -> None:
        self.boto = boto
        self._options = options
        self._clock = clock
        self._keys = KeyHolder(credentials)
        self._places = CallPlaces(boto.clients)
        self._finding = anyio.Lock()
        self._known: dict[tuple[str, str], CallPlace | None] = {}
        self._lanes: dict[tuple[str, Proxy | None], CallLane] = {}
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        """The number of open connections, and of those being made."""
        return sum(lane.client.open_connections for lane in self._lanes.values())

    async def once(self, service: str, operation: str, parameters: Parameters) -> Answer:
        call = OWN_CALLS.get((service, operation))
        if call is None or not call.takes(parameters):
            return await self.boto.once(service, operation, parameters)
        await anyio.lowlevel.checkpoint_if_cancelled()
        about = (service, parameters["Bucket"] if service == "s3" else "")
        try:
            place = self._known[about]
        except KeyError:
            place = await self._find(about, parameters)
        if place is None:
            return await self.boto.once(service, operation, parameters)
        lane = self._lane(service, operation, place)
        await lane.turns.acquire()
        try:
            exchange = self._exchange(lane, place, call, parameters)
            return await _to_its_end(exchange, lane, may_be_left=MAY_BE_LEFT.get())
        except Moved:
            self._known[about] = None
            return await self.boto.once(service, operation, parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self.boto.presign(operation, parameters, seconds=seconds)

    async def aclose(self) -> None:
        self._is_closed = True
        for lane in self._lanes.values():
            await lane.client.aclose()
        await self._keys.aclose()
        await self.boto.aclose()

    async def _find(self, about: tuple[str, str], parameters: Parameters) -> CallPlace | None:
        """Find the place of calls about a service or bucket, and remember it."""
        async with self._finding:
            if about not in self._known:
                try:
                    place = await anyio.to_thread.run_sync(self._places.find, about[0], parameters)
                except Unplaced:
                    return None
                self._known[about] = place
            return self._known[about]

    def _lane(self, service: str, operation: str, place: CallPlace) -> CallLane:
        """Return the lane of a call. Long polls have their own, or all others would wait for them;
        so have bodies, whose readers may be slow."""
        name = {"receive_message": "receive", "get_object": "bodies"}.get(operation, service)
        lane = self._lanes.get((name, place.proxy))
        if lane is None:
            options = self._options
            turns = options.receive_threads if name == "receive" else options.threads
            client = HttpClient(
                connections=max(turns, BODIES_OPEN) if name == "bodies" else turns,
                options=ClientOptions(
                    authority=place.authority,
                    alone=True,
                    connect=options.connect_timeout,
                    proxy=place.proxy,
                ),
            )
            lane = self._lanes[name, place.proxy] = CallLane(client, turns)
        return lane

    async def _exchange(
        self, lane: CallLane, place: CallPlace, call: OwnCall, parameters: Parameters
    ) -> Answer:
        """Send a call and read its answer. Raises AwsRefused, Unanswered, Moved."""
        try:
            keys = await self._keys.current()
        except ClientError as error:
            raise read_client_error(error, call.asked) from None
        size = call.size(parameters)
        request: HttpRequest
        if size > LARGE:
            request = await anyio.to_thread.run_sync(call.write, parameters)
        else:
            request = call.write(parameters)
        part = SignedPart(
            request.method,
            place.path + request.path,
            {**request.headers, "host": place.host},
            request.digest,
        )
        if self._is_closed:
            # It waited for a turn, keys or a thread, and would open its client anew.
            raise Unanswered("ConnectionClosedError", is_silence=False)
        headers = place.signer.sign(part, keys, self._clock.now())
        headers["user-agent"] = "conveyor"
        options = self._options
        try:
            answer = await lane.client.send(
                request.method,
                place.url + request.path,
                headers=headers,
                body=request.body,
                timeout=options.connect_timeout + options.read_timeout + size / LARGE,
                repeatable=True,
            )
            return await self._read(call, answer)
        except TransportError as error:
            if error.is_queued:
                raise Unanswered(NO_TURN, is_silence=False) from None
            raise Unanswered(_word(error)) from None
        except ForeignAnswer:
            raise Unanswered("ForeignAnswer") from None

    async def _read(self, call: OwnCall, answer: wire.Answer) -> Answer:
        headers = answer.headers.firsts()
        read: Answer
        if call.streams and answer.status < 300:
            try:
                read = read_answer(call, answer.status, headers, b"")
            except BaseException:
                answer.release()
                raise
            read["Body"] = HttpBody(answer, self._options.read_timeout)
        else:
            body = await answer.read()
            read = read_answer(call, answer.status, headers, body)
        read["ResponseMetadata"] = {"HTTPStatusCode": answer.status, "HTTPHeaders": headers}
        return read


class HttpBody:
    """A streamed body. What is asked for may take `patience` seconds to come. If nobody asks for
    BODY_KEPT seconds, its connection is dropped."""

    def __init__(self, answer: wire.Answer, patience: float) -> None:
        self._answer = answer
        self._patience = patience
        self._held = b""
        answer.allow(BODY_KEPT)

    async def read(self, most: int) -> bytes:
        pieces, size = [self._held], len(self._held)
        was_broken = self._answer.is_broken
        while size < most:
            self._answer.allow(self._patience)
            try:
                piece = await anext(self._answer, b"")
            except TransportError as error:
                if was_broken and error.trouble is TransportTrouble.TIMEOUT:
                    if size:
                        break
                    raise BodyGivenBack from None
                raise ConveyorError(
                    ErrorCode.UNAVAILABLE,
                    f"s3 get_object broke off: {_word(error)}",
                    retry_after=5,
                ) from None
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        self._answer.allow(BODY_KEPT)
        found = b"".join(pieces)
        self._held = found[most:]
        return found[:most]

    def close(self) -> None:
        self._answer.release()


def _word(error: TransportError) -> str:
    if error.trouble is TransportTrouble.TIMEOUT and error.is_connecting:
        return "ConnectTimeoutError"
    return _WORDS.get(error.trouble, "HTTPClientError")


async def _to_its_end(
    exchange: Coroutine[Any, Any, Answer], lane: CallLane, *, may_be_left: bool
) -> Answer:
    """Let an exchange end in a task of its own, and give its turn back then.

    A caller that is cancelled waits for it all the same: what the service was asked to do is done
    by then, or will never be, and whatever undoes it comes after it. An exchange that may be left
    is cancelled with its caller, and its connection dropped.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(exchange)
    over = loop.create_future()

    def end(_task: asyncio.Task[Answer]) -> None:
        lane.turns.release()
        if not over.done():
            over.set_result(None)

    task.add_done_callback(end)
    try:
        await over
    except asyncio.CancelledError:
        if may_be_left:
            task.cancel()
        await _end_of(task)
        if not task.cancelled() and await _is_cancelled():
            # The caller gets what came, and is cancelled where it waits next: as by a thread.
            return task.result()
        _forget(task)
        raise
    return task.result()


async def _end_of(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task, however often its caller is cancelled."""
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue


def _forget(task: asyncio.Task[Answer]) -> None:
    """Take note of an answer that nobody waits for any more."""
    if not task.cancelled() and task.exception() is None and "Body" in task.result():
        task.result()["Body"].close()


async def _is_cancelled() -> bool:
    """Return whether a scope around the caller is cancelled, rather than its task."""
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
    except asyncio.CancelledError:
        return True
    return False
