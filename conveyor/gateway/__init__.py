"""The gateways: each scrapes one URL at a time, behind `conveyor.ports.gateway`."""

from __future__ import annotations

from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway


def open_gateway(
    kind: str,
    clock: Clock,
    *,
    allow_private: bool,
    connections: int,
    retry_after_cap: float,
) -> Gateway:
    """Open the gateway that a setting names: "direct", "fake", or the URL of a scraping API.

    `connections` bounds the open connections. A Retry-After counts for at most `retry_after_cap`
    seconds. `allow_private` matters to "direct" alone. Only the modules of the chosen gateway are
    imported.
    """
    if kind == "fake":
        from conveyor.gateway.fake import FakeGateway

        return FakeGateway(clock, retry_after_cap=retry_after_cap)
    if kind == "direct":
        from conveyor.gateway.direct import DirectGateway

        return DirectGateway(
            clock,
            allow_private=allow_private,
            connections=connections,
            retry_after_cap=retry_after_cap,
        )
    from conveyor.gateway.http import HttpGateway

    return HttpGateway(kind, clock, connections=connections, retry_after_cap=retry_after_cap)
