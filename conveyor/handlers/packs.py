"""Gather the bodies of a run that come close together, and store them as one.

An object of the store costs the same whatever it holds. So the first body of a run waits for others
a moment, and they are written one after the other under one key. Rows name them by their places.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial

import anyio
from cachetools import LRUCache

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.aio.resilience import CircuitBreaker
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.blobs import BlobWriter, BodyRefused, Content
from conveyor.ports.clock import Clock
from conveyor.ports.handler import Observer
from conveyor.records.packed_bodies import (
    RANGE_BYTES,
    pack_key,
    packed_bodies,
    packed_body,
    place_body,
)

PACKED_MOST = 256 * 1024
"""Most bytes of a packed body, which a gateway hands over in one piece at most: it is read in one
piece, too, and checked before a byte of it is served."""
GATHERING = 0.3
"""Seconds for which the first body of a pack waits for others."""
PATIENCE = 60.0
"""Seconds for which bodies are kept in memory while the store does not take them."""
LAST_PATIENCE = 10.0
"""Seconds for which they are tried after a stop. A try that is not answered by then is given up."""
TRIAL_PAUSE = 0.5
"""Seconds between two looks whether the store may be tried again."""
_REMEMBERED = 4_096
"""Packs of which it is known which of their bodies a row may name. One that is forgotten stays
until its run is deleted."""


_log = logging.getLogger("conveyor.tasks")


class _Pack:
    """Bodies of one run that are to be written together. `keys` are those that their rows are to
    name. No body comes once it `is_due`. `written` is set once they are stored, or `error` says why
    they are not."""

    def __init__(self, first: str) -> None:
        self.key = pack_key(first)
        self.size = 0
        self.bodies: list[bytes] = []
        self.keys: list[str] = []
        self.is_due = anyio.Event()
        self.written = anyio.Event()
        self.error: Exception | None = None

    def has_room(self, body: bytes) -> bool:
        """Tell whether a body may be added."""
        return not self.is_due.is_set() and self.size + len(body) <= RANGE_BYTES

    def add(self, body: bytes) -> int:
        """Add a body; return its place in the list."""
        self.keys.append(place_body(self.key, self.size, body).key)
        self.bodies.append(body)
        self.size += len(body)
        return len(self.bodies) - 1


class BodyPacks:
    """The bodies of one process that wait to be stored, in one pack a run at a time.

    Every try of a pack has the same bytes under the same key, so that one which arrives late
    changes nothing.
    """

    def __init__(
        self, blobs: BlobWriter, clock: Clock, *, breaker: CircuitBreaker, observer: Observer
    ) -> None:
        self._blobs = blobs
        self._clock = clock
        self._breaker = breaker
        self._observer = observer
        self._open: dict[str, _Pack] = {}
        self._unsettled: LRUCache[str, set[int]] = LRUCache(_REMEMBERED)
        self._kept = 0
        self._stopped_at = math.inf
        self._stopping = anyio.Event()

    @property
    def keeps_some(self) -> bool:
        """True while bodies are kept in memory that the store did not take: they are its next
        trial, which then costs no call of the gateway."""
        return self._kept > 0

    def stop(self) -> None:
        """Store at once what waits, and what comes."""
        self._stopped_at = self._clock.monotonic()
        self._stopping.set()
        for pack in self._open.values():
            pack.is_due.set()

    async def put(self, key: str, body: bytes) -> str:
        """Store a body; return the key that its row is to name. Raises what `BlobWriter.put`
        raises, once the store has not taken it for PATIENCE."""
        if not body or len(body) > PACKED_MOST:
            await self._store(key, body)
            return key
        pack, place = await self._gather(key, body)
        if pack.error is None:
            return key if len(pack.bodies) == 1 else pack.keys[place]
        if isinstance(pack.error, BodyRefused) and len(pack.bodies) > 1:
            # One of them may be the reason. The others need not be lost with it.
            await self._store(key, body)
            return key
        raise pack.error

    async def drop(self, key: str) -> None:
        """Note that no row will name a stored body, and remove it. The bytes of a packed one stay
        until no other body of its pack may be named."""
        packed = packed_body(key)
        if packed is None:
            await self._blobs.delete(key)
            return
        left = self._unsettled.get(packed.pack, set())
        if packed.offset in left:
            left.remove(packed.offset)
            if not left:
                del self._unsettled[packed.pack]
                await self._blobs.delete(packed.pack)

    async def _gather(self, key: str, body: bytes) -> tuple[_Pack, int]:
        """Have a body written with others of its run; return the pack and the place in it."""
        run = key.rsplit("/", 2)[0]
        pack = self._open.get(run)
        if pack is not None and pack.has_room(body):
            place = pack.add(body)
            await pack.written.wait()
            return pack, place
        if pack is not None:
            pack.is_due.set()
        pack = self._open[run] = _Pack(key)
        place = pack.add(body)
        try:
            if self._stopped_at == math.inf:
                await wait_or_timeout(pack.is_due, self._clock, GATHERING)
            pack.is_due.set()
            if self._open.get(run) is pack:
                del self._open[run]
            await self._write(pack, key)
        except Exception as error:
            pack.error = error
        except BaseException:
            pack.error = ConveyorError(ErrorCode.UNAVAILABLE, "the worker stopped")
            raise
        finally:
            pack.is_due.set()
            pack.written.set()
        return pack, place

    async def _write(self, pack: _Pack, first: str) -> None:
        """Write a pack; a body that is alone under its own key, so that it can be linked to."""
        if len(pack.bodies) == 1:
            await self._store(first, pack.bodies[0])
            return
        await self._store(pack.key, b"".join(pack.bodies), bodies=len(pack.bodies))
        places = packed_bodies(pack.keys)
        self._unsettled[pack.key] = {place.offset for place in places}

    async def _store(self, key: str, content: bytes, *, bodies: int = 1) -> None:
        """Write one object, and keep it in memory while the store is away."""
        began = self._clock.monotonic()
        is_kept = False
        try:
            while True:
                is_last = self._clock.monotonic() >= began + PATIENCE
                try:
                    await self._try(key, content, began, guarded=not is_last)
                except BodyRefused:
                    raise
                except ConveyorError as error:
                    if is_last:
                        raise
                    failure = error
                else:
                    self._observer.bodies_written(bodies, len(content))
                    return
                self._kept += not is_kept
                is_kept = True
                left = self._last_moment(began) - self._clock.monotonic()
                await self._clock.sleep(max(0.0, min(TRIAL_PAUSE, left)))
                if self._clock.monotonic() >= self._last_moment(began):
                    raise failure
        finally:
            self._kept -= is_kept

    def _last_moment(self, began: float) -> float:
        """Return until when an object may be tried that was first tried at `began`."""
        if self._stopped_at == math.inf:
            return math.inf
        return max(began, self._stopped_at) + LAST_PATIENCE

    async def _try(self, key: str, content: bytes, began: float, *, guarded: bool) -> None:
        """Write one object; with `guarded`, if the breaker lets it pass. After a stop it need not:
        there is no later."""
        guarded = guarded and self._stopped_at == math.inf
        with self._breaker.guard() if guarded else nullcontext():
            try:
                await self._put_in_time(key, content, began)
            except BodyRefused:
                self._breaker.succeeded()
                raise
            except ConveyorError as error:
                self._breaker.failed(error.detail)
                raise
            self._breaker.succeeded()

    async def _put_in_time(self, key: str, content: bytes, began: float) -> None:
        """Write one object, and give it up at the last moment that a stop leaves."""

        async def over() -> None:
            await self._stopping.wait()
            await self._clock.sleep(max(0.0, self._last_moment(began) - self._clock.monotonic()))

        await put_until(over, partial(self._blobs.put, key, content))


class StoppableWrites(BlobWriter):
    """Writes bodies, and bounds the writes of those that are in hand once the worker stops: each
    gets LAST_PATIENCE from then on, or from its beginning if that is later. One that is under way
    then begins again; where it cannot be left at once, only within that time."""

    def __init__(self, blobs: BlobWriter, clock: Clock) -> None:
        self._blobs = blobs
        self._clock = clock
        self._under_way: set[anyio.CancelScope] = set()
        self._stopped_at = math.inf

    def stop(self) -> None:
        """Bound all writes from now on."""
        self._stopped_at = self._clock.monotonic()
        for scope in self._under_way:
            scope.cancel()

    async def put(self, key: str, content: Content) -> int:
        if not isinstance(content, bytes):
            return await self._blobs.put(key, content)
        began = self._clock.monotonic()
        if self._stopped_at == math.inf:
            with anyio.CancelScope() as scope:
                self._under_way.add(scope)
                try:
                    return await self._blobs.put(key, content)
                finally:
                    self._under_way.discard(scope)
        left = max(began, self._stopped_at) + LAST_PATIENCE - self._clock.monotonic()
        if left <= 0:
            raise _given_up()
        over = partial(self._clock.sleep, left)
        return await put_until(over, partial(self._blobs.put, key, content))

    async def delete(self, key: str) -> None:
        await self._blobs.delete(key)


async def put_until(over: Callable[[], Awaitable[None]], put: Callable[[], Awaitable[int]]) -> int:
    """Write an object, and give it up once `over` returns; return its size.

    Raises what `put` raises; ConveyorError(unavailable) if it was given up.
    """
    failure: Exception | None = None
    size: int | None = None
    async with anyio.create_task_group() as group:

        async def give_up() -> None:
            await over()
            group.cancel_scope.cancel()

        group.start_soon(give_up)
        try:
            size = await put()
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if size is None:
        raise failure or _given_up()
    return size


def _given_up() -> ConveyorError:
    _log.warning("a body was not stored before the stop: its call is made again")
    detail = "the store did not answer before the worker stopped"
    return ConveyorError(ErrorCode.UNAVAILABLE, detail)
