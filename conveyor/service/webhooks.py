"""Set the webhooks of jobs, and test receivers with an event that belongs to no job."""

from __future__ import annotations

from conveyor.domain import strict_json
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.deliveries import (
    AttemptResult,
    EventDelivery,
    begin_test,
    end_test,
)
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.run_events import build_test_event
from conveyor.domain.webhooks import Webhook, parse_webhook, parse_webhook_update
from conveyor.ports.webhooks import WebhookAnswer, Webhooks
from conveyor.records.signed_events import KEY_UNREADABLE, EventSigner, cut_signatures
from conveyor.service.context import Context
from conveyor.service.deliveries import drop_owed
from conveyor.service.responses import webhook_body
from conveyor.service.schemas import WebhookBody, WebhookTestBody, present

MOST_TESTS = 16
"""Tests under way at a time in one process; of one caller, one."""


class ReceiverCheck:
    """Judges whether events of a caller may go to a receiver as asked."""

    def __init__(self, webhooks: Webhooks, signer: EventSigner) -> None:
        self._webhooks = webhooks
        self._signer = signer

    async def check(self, caller: str, webhook: Webhook, *, prefix: str = "") -> None:
        """Return if they may. An error names the field, behind `prefix`.

        Raises ConveyorError: invalid_argument, callback_url_must_be_https,
        callback_url_unresolvable, webhook_signing_requires_active_key.
        """
        try:
            await self._webhooks.check_url(webhook.url)
        except ConveyorError as error:
            raise ConveyorError(error.code, prefix + error.detail) from None
        if webhook.signature and not await self._signer.has_active_key(caller):
            raise ConveyorError(
                ErrorCode.WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY,
                f"{prefix}signature: make a signing key first (POST /v1/hmac/keys/rotate)",
            )


class JobWebhooks:
    """Shows, sets and removes the webhooks of jobs."""

    def __init__(self, context: Context, receivers: ReceiverCheck) -> None:
        self._context = context
        self._receivers = receivers

    async def get(self, caller: str, job_id: str) -> WebhookBody:
        """Show the webhook of a job. Raises ConveyorError(not_found), also if it has none."""
        job = (await self._context.live_job(caller, job_id)).job
        if job.webhook is None:
            raise not_found("webhook")
        return webhook_body(job.webhook)

    async def put(self, caller: str, job_id: str, body: bytes) -> WebhookBody:
        """Set the webhook of a job from a JSON document.

        It counts from the next attempt on. Raises ConveyorError: not_found, and as
        `parse_webhook_update` and `ReceiverCheck.check` do.
        """
        job = (await self._context.live_job(caller, job_id)).job
        webhook = parse_webhook_update(strict_json.decode(body), before=job.webhook)
        await self._receivers.check(caller, webhook)
        now = self._context.clock.now()
        await self._context.jobs.set_webhook(caller, job_id, webhook, now=now)
        return webhook_body(webhook)

    async def delete(self, caller: str, job_id: str) -> None:
        """Remove the webhook of a job, and drop what is still owed. Idempotent. Raises
        ConveyorError(not_found)."""
        await self._context.live_job(caller, job_id)
        now = self._context.clock.now()
        await self._context.jobs.set_webhook(caller, job_id, None, now=now)
        await drop_owed(self._context, caller, job_id)


class WebhookTests:
    """Posts test events, and keeps them in the log. One at a time for a caller, since each holds a
    connection to a host of the caller's choice."""

    def __init__(
        self,
        context: Context,
        webhooks: Webhooks,
        receivers: ReceiverCheck,
        signer: EventSigner,
    ) -> None:
        self._clock = context.clock
        self._log = context.deliveries
        self._webhooks = webhooks
        self._receivers = receivers
        self._signer = signer
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
            await self._receivers.check(caller, webhook)
            return await self._logged(caller, webhook)
        finally:
            self._testing.discard(caller)

    async def _logged(self, caller: str, webhook: Webhook) -> WebhookTestBody:
        """Post an event that is in the log before it is sent: no request goes without a row."""
        event_id, now = self._clock.new_id(), self._clock.now()
        body = build_test_event(event_id=event_id, now=now).encode()
        begun = begin_test(event_id, caller, body, now=now)
        await self._log.create_delivery(begun)
        headers, answer = await self._post(begun, webhook)
        result = AttemptResult(
            error=answer.error,
            milliseconds=answer.milliseconds,
            host=answer.host,
            status=answer.status,
            content_type=answer.content_type,
            length=answer.length,
            headers=cut_signatures(headers),
        )
        ended = end_test(begun, result, now=self._clock.now())
        await self._log.change_delivery(begun, ended)
        return WebhookTestBody(
            delivered=not answer.error,
            event_id=event_id,
            status_code=present(answer.status),
            error=present(answer.error or None),
            elapsed_ms=answer.milliseconds,
        )

    async def _post(
        self, delivery: EventDelivery, webhook: Webhook
    ) -> tuple[dict[str, str], WebhookAnswer]:
        """Post an event, and return its headers and what came of it."""
        try:
            headers = await self._signer.headers(
                delivery.caller,
                delivery.body,
                event_id=delivery.delivery_id,
                attempt=1,
                signed=webhook.signature,
            )
        except UnsealError:
            return {}, WebhookAnswer(error=KEY_UNREADABLE)
        answer = await self._webhooks.post_event(webhook.url, headers=headers, body=delivery.body)
        return headers, answer


def _too_many(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.RATE_LIMITED, problem, retry_after=1)
