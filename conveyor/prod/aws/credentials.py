"""Hold the credentials of a process for calls that sign for themselves."""

from __future__ import annotations

import asyncio

import anyio.to_thread
from botocore.credentials import Credentials, ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError

from conveyor.prod.aws.carriers import NOT_RENEWED, Unanswered

AHEAD = 960
"""Seconds before their end from which credentials are asked for in a thread: botocore renews them
at the first request within the last 900."""
LOOK_EVERY = 1.0
"""Seconds between two looks at whether credentials are about to end."""


class KeyHolder:
    """The present keys. Where they end, they are renewed in a thread, once for all who wait.

    Belongs to one event loop.
    """

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._keys: ReadOnlyCredentials | None = None
        self._look_at = 0.0
        self._renewal: asyncio.Task[ReadOnlyCredentials] | None = None

    async def current(self) -> ReadOnlyCredentials:
        """Return the keys: those that there are until their end, if they cannot be renewed.

        Raises Unanswered if there are none; ClientError if a service refuses to renew them.
        """
        loop = asyncio.get_running_loop()
        keys = self._keys
        if keys is not None and loop.time() < self._look_at:
            return keys
        credentials = self._credentials
        if credentials is None:
            raise Unanswered("NoCredentialsError")
        if isinstance(credentials, RefreshableCredentials) and credentials.refresh_needed(AHEAD):
            keys = await self._renewed(credentials)
        else:
            keys = credentials.get_frozen_credentials()
        self._keys = keys
        self._look_at = loop.time() + LOOK_EVERY
        return keys

    async def aclose(self) -> None:
        """Wait for a renewal under way."""
        if self._renewal is not None:
            await asyncio.wait([self._renewal])

    async def _renewed(self, credentials: RefreshableCredentials) -> ReadOnlyCredentials:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(_renew(credentials))
            self._renewal.add_done_callback(_note)
        # A caller that is cancelled takes the keys from nobody else.
        return await asyncio.shield(self._renewal)


def _note(renewal: asyncio.Task[ReadOnlyCredentials]) -> None:
    """Take note of a failure, which may come when nobody waits any more."""
    if not renewal.cancelled():
        renewal.exception()


async def _renew(credentials: RefreshableCredentials) -> ReadOnlyCredentials:
    try:
        return await anyio.to_thread.run_sync(credentials.get_frozen_credentials)
    except Exception as error:
        # botocore has logged it, and would not sign with keys in their last ten minutes.
        last: ReadOnlyCredentials | None = credentials._frozen_credentials
        if last is not None and not credentials.refresh_needed(0):
            return last
        if isinstance(error, ClientError):
            raise
        # The text of any other may quote what a program of credentials said.
        is_known = isinstance(error, BotoCoreError)
        raise Unanswered(type(error).__name__ if is_known else NOT_RENEWED) from None
