"""A receiver of events within reach of this machine."""

from __future__ import annotations

import anyio
import httpx

from conveyor import __version__
from conveyor.client.api import web_address
from conveyor.client.output import printable


class PostOutcome:
    """The outcome of a request to the receiver: the status of its answer, None without one."""

    def __init__(self, status: int | None, error: str = "") -> None:
        self.status = status
        self.taken = status is not None and 200 <= status < 300
        self.words = error or str(status)


class Receiver:
    """A receiver of events. Raises ClientError for an address that is none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._address = web_address(url, "not an http or https address")
        # Each request is bounded as a whole.
        self._client = httpx.AsyncClient(
            timeout=None, verify=self._address.scheme == "https", trust_env=False
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(self, headers: dict[str, str], body: bytes, *, seconds: float) -> PostOutcome:
        """Post an event without following redirects, and wait so long for the head of the answer.

        The body of the answer is not read: it need not end.
        """
        usual = {"Content-Type": "application/json", "User-Agent": f"conveyor/{__version__}"}
        outcome = PostOutcome(None, f"no answer for {seconds:.3g} s")
        try:
            with anyio.move_on_after(seconds):
                async with self._client.stream(
                    "POST", self._address, content=body, headers={**usual, **headers}
                ) as answer:
                    outcome = PostOutcome(answer.status_code)
        except httpx.RequestError as error:
            if outcome.status is None:
                return PostOutcome(None, printable(str(error) or type(error).__name__))
        return outcome
