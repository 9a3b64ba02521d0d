"""The gateways: each scrapes one URL at a time, behind `conveyor.ports.gateway`."""

from __future__ import annotations

from dataclasses import replace

from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.wire.options import USUAL, ClientOptions


def open_gateway(
    kind: str,
    clock: Clock,
    *,
    allow_private: bool,
    connections: int,
    retry_after_cap: float,
    engine: str = "wire",
    options: ClientOptions = USUAL,
) -> Gateway:
    """Open the gateway that a setting names: "direct", "fake", or the URL of a scraping API.

    `connections` bounds the open connections. A Retry-After counts for at most `retry_after_cap`
    seconds. `allow_private` matters to "direct" alone, a proxy among the `options` to an API alone.
    `engine` is "wire" or "aiohttp". Only the modules of the chosen gateway are imported. Raises
    ScrapeFailed for a URL that cannot be called, ImportError for an engine that is not installed.
    """
    if kind == "fake":
        from conveyor.gateway.fake import FakeGateway

        return FakeGateway(clock, retry_after_cap=retry_after_cap, keeps_hits=False)
    if kind == "direct":
        from conveyor.gateway.direct import DirectGateway
        from conveyor.gateway.http_client import client_opener

        # A proxy would resolve names, and nobody would judge the addresses.
        unproxied = replace(options, proxy=None)
        return DirectGateway(
            clock,
            allow_private=allow_private,
            connections=connections,
            retry_after_cap=retry_after_cap,
            open_client=client_opener(engine, unproxied),
        )
    from conveyor.gateway.http import HttpGateway
    from conveyor.gateway.http_client import client_opener

    return HttpGateway(
        kind,
        clock,
        connections=connections,
        retry_after_cap=retry_after_cap,
        open_client=client_opener(engine, options),
    )
