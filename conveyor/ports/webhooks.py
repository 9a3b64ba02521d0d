"""The webhooks port: requests to the receivers of callers' events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class WebhookAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one request.

    `status` is that of the answer, None if none came. `error` is empty after a 2xx, else in the
    words of the API: `http_4xx:404`, `timeout`, `transport_error:…`. `milliseconds` is the time it
    took. `content_type` and `length` describe the answer's body, whose bytes are thrown away.
    `retry_after` is in seconds, None without exactly one Retry-After that can be read. `host` is
    the one that was to be reached, empty if the URL names none.
    """

    status: int | None = None
    error: str = ""
    milliseconds: int = 0
    content_type: str = ""
    length: int | None = None
    retry_after: float | None = None
    host: str = ""


class Webhooks(Protocol):
    """Requests to receivers, by rules of their own on where they may go."""

    async def check_url(self, url: str) -> None:
        """Return if events may go to a URL. Nothing is connected to.

        Raises ConveyorError: callback_url_must_be_https; callback_url_unresolvable if its host has
        no address within a second, or one that may not be touched; invalid_argument.
        """
        ...

    async def post_event(
        self, url: str, *, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        """Post an event over a connection of its own, without following redirects.

        The host is resolved anew, and each of its addresses and the peer are judged before a byte
        is sent.
        """
        ...

    async def aclose(self) -> None:
        """End what is under way."""
        ...
