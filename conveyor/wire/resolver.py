"""Look up host names: at most some at a time, and one look-up a name for all who ask."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address

from cachetools import TTLCache

from conveyor.wire.errors import TransportError, TransportTrouble, unresolved

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Return the IP addresses of a host name (and port), as text. Raises OSError if there are no
addresses."""
Admits = Callable[[str], bool]
"""Return whether an IP address may be touched."""

_log = logging.getLogger("conveyor.wire")

AT_A_TIME = 64
_REMEMBERED, _SECONDS = 1_024, 10.0


class Resolver:
    """Turn hosts into addresses that `admits` admits. Belongs to one event loop.

    A name's addresses are remembered for 10 s. `admits` is asked each time.
    """

    def __init__(self, lookup: Lookup | None, admits: Admits | None) -> None:
        self._lookup = lookup if lookup is not None else system_lookup
        self._admits = admits
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._going: dict[tuple[str, int], asyncio.Task[list[str]]] = {}
        loop = asyncio.get_running_loop()
        self._known: TTLCache[tuple[str, int], list[str]] = TTLCache(
            _REMEMBERED, _SECONDS, timer=loop.time
        )

    async def resolve(self, host: str, port: int, *, afresh: bool = False) -> list[str]:
        """Return the addresses of a host that may be connected to; `afresh` remembers none.

        Raises TransportError: UNRESOLVED if the name has no address, EXHAUSTED if this process
        cannot ask, REFUSED if none may be touched.
        """
        if afresh:
            self._known.pop((host, port), None)
        addresses = [host] if is_address(host) else await self._addresses((host, port))
        admits = self._admits
        if admits is None:
            return addresses
        admitted = [address for address in addresses if admits(address)]
        if not admitted:
            raise TransportError(TransportTrouble.REFUSED)
        return admitted

    async def aclose(self) -> None:
        """Forget the look-ups under way."""
        going = list(self._going.values())
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)

    async def _addresses(self, name: tuple[str, int]) -> list[str]:
        known: list[str] | None = self._known.get(name)
        if known is not None:
            return known
        task = self._going.get(name)
        if task is None:
            task = self._going[name] = asyncio.create_task(self._look_up(name))
            task.add_done_callback(partial(self._looked_up, name))
        failure: Exception | None = None
        try:
            # A caller that is cancelled takes the answer from nobody else.
            addresses = await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            addresses = []  # the look-up was given up, not its caller
        except (OSError, UnicodeError) as error:
            addresses, failure = [], error
        except Exception as error:
            # A fault of the look-up must not break its caller, nor pass unseen.
            _log.error("a look-up broke: %s", type(error).__name__)
            addresses = []
        if not addresses:
            raise unresolved(failure) from None
        return addresses

    async def _look_up(self, name: tuple[str, int]) -> list[str]:
        async with self._turns:
            return await self._lookup(*name)

    def _looked_up(self, name: tuple[str, int], task: asyncio.Task[list[str]]) -> None:
        del self._going[name]
        if not task.cancelled() and task.exception() is None and task.result():
            self._known[name] = task.result()


def is_address(host: str) -> bool:
    """Return whether a host is an IP address rather than a name."""
    if ":" not in host and not host[-1:].isdigit():
        return False
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


async def system_lookup(host: str, port: int) -> list[str]:
    """Look a name up in a thread of its own.

    The loop's own lookups share a few threads. A few names whose servers do not answer would block
    every other name, and the end of the process, for as long as the resolver waits.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
            settle = partial(_answer, answer, addresses)
        except Exception as error:
            settle = partial(_refuse, answer, error)
        # If the loop has closed meanwhile, nobody waits for the answer.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    try:
        threading.Thread(target=look_up, name="look-up", daemon=True).start()
    except RuntimeError:
        raise OSError(errno.ENOMEM, "no thread for a look-up") from None
    return await answer


def _answer(future: asyncio.Future[list[str]], addresses: list[str]) -> None:
    if not future.done():
        future.set_result(addresses)


def _refuse(future: asyncio.Future[list[str]], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
