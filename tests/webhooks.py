"""The sender of events in tests: the real one, which may call this machine."""

from __future__ import annotations

from conveyor.gateway.webhook import WebhookRules, WebhookSender
from conveyor.ports.clock import Clock
from conveyor.wire.resolver import Lookup, system_lookup

LOOPBACK = WebhookRules(loopback=True)
"""The rules of conveyor-dev."""


def loopback_webhooks(clock: Clock, lookup: Lookup = system_lookup) -> WebhookSender:
    """The sender of conveyor-dev."""
    return WebhookSender(clock, LOOPBACK, lookup=lookup)
