"""Test a receiver of events: post one that belongs to no job, and say what came of it."""

from __future__ import annotations

from conveyor.domain import strict_json
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.run_events import build_test_event
from conveyor.domain.webhooks import Webhook, parse_webhook
from conveyor.ports.clock import Clock
from conveyor.ports.webhooks import WebhookAnswer, Webhooks
from conveyor.records.signed_events import KEY_UNREADABLE, EventSigner
from conveyor.service.schemas import WebhookTestBody, present

MOST_TESTS = 16
"""Tests under way at a time in one process; of one caller, one."""


class WebhookTests:
    """Posts test events. One at a time for a caller, since each holds a connection to a host of the
    caller's choice."""

    def __init__(self, webhooks: Webhooks, signer: EventSigner, clock: Clock) -> None:
        self._webhooks = webhooks
        self._signer = signer
        self._clock = clock
        self._testing: set[str] = set()

    async def test(self, caller: str, body: bytes) -> WebhookTestBody:
        """Post one event to the receiver that a JSON document names.

        Raises ConveyorError: invalid_argument, callback_url_must_be_https,
        callback_url_unresolvable, webhook_signing_requires_active_key; rate_limited while another
        test of the caller, or MOST_TESTS of all callers, are under way.
        """
        webhook = parse_webhook(strict_json.decode(body))
        if caller in self._testing:
            raise _too_many("your other test is under way; one at a time")
        if len(self._testing) >= MOST_TESTS:
            raise _too_many(f"{MOST_TESTS} tests of all callers are under way")
        self._testing.add(caller)
        try:
            await self._check(caller, webhook)
            return await self._post(caller, webhook)
        finally:
            self._testing.discard(caller)

    async def _check(self, caller: str, webhook: Webhook) -> None:
        await self._webhooks.check_url(webhook.url)
        if webhook.signature and not await self._signer.has_active_key(caller):
            raise ConveyorError(
                ErrorCode.WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY,
                "signature: make a signing key first (POST /v1/hmac/keys/rotate)",
            )

    async def _post(self, caller: str, webhook: Webhook) -> WebhookTestBody:
        event_id = self._clock.new_id()
        body = build_test_event(event_id=event_id, now=self._clock.now()).encode()
        try:
            headers = await self._signer.headers(
                caller, body, event_id=event_id, attempt=1, signed=webhook.signature
            )
        except UnsealError:
            answer = WebhookAnswer(error=KEY_UNREADABLE)
        else:
            answer = await self._webhooks.post_event(webhook.url, headers=headers, body=body)
        return WebhookTestBody(
            delivered=not answer.error,
            event_id=event_id,
            status_code=present(answer.status),
            error=present(answer.error or None),
            elapsed_ms=answer.milliseconds,
        )


def _too_many(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.RATE_LIMITED, problem, retry_after=1)
