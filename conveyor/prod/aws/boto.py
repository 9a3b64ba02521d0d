"""Calls to AWS through boto3: low-level clients in threads, so that no call blocks the event loop.

boto3 itself makes one attempt and validates no parameters: walking every attribute costs as much
CPU as all the rest of a batch write. Retries are made here, on the injected clock.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from functools import partial
from typing import Any
from zlib import crc32

import anyio
import anyio.to_thread
import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    ConnectionClosedError,
    InvalidConfigError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.handlers import convert_body_to_file_like_object
from urllib3.exceptions import HTTPError

from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.answers import AnswerParsers, ForeignAnswer
from conveyor.prod.aws.calls import (
    THROTTLED_PARTS,
    Answer,
    AwsOptions,
    AwsRefused,
    CallStats,
    Parameters,
    ShortLived,
)

THROTTLES = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingError",
        "ThrottlingException",
        "TooManyRequestsException",
        "ThrottledException",
    }
)
PASSING = THROTTLES | {
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "RequestTimeout",
    "ServiceUnavailable",
    "TransactionConflictException",
    "TransactionInProgressException",
    "KMS.ThrottlingException",
}
"""Refusals that pass by themselves: the call is retried."""
PASSING_REASONS = frozenset(
    {"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded", "None"}
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})
_LENGTHS = frozenset({"content-length", "transfer-encoding"})
PATIENCE = 25.0
"""Seconds from the first attempt after which a call is not retried. If a service hangs, that allows
two attempts of the read timeout: a caller of the API gets its error before a load balancer, which
waits for a minute, answers instead."""
_UNANSWERED = (BotoCoreError, ForeignAnswer, HTTPError)
"""Errors of a call that got no answer. boto3 lets errors of the HTTP library pass if the body of a
refusal is cut off and the body of a success would have been streamed."""
_COUNTS_CAPACITY = frozenset(
    {
        "get_item",
        "put_item",
        "update_item",
        "delete_item",
        "query",
        "scan",
        "batch_get_item",
        "batch_write_item",
        "batch_execute_statement",
        "execute_statement",
        "transact_write_items",
        "transact_get_items",
    }
)


class BotoAws:
    """An `Aws` over boto3. `open_aws` makes it."""

    def __init__(
        self,
        clients: dict[str, Any],
        options: AwsOptions,
        clock: Clock,
        *,
        credentials: Credentials | None = None,
    ) -> None:
        self.stats = CallStats()
        self._clients = clients
        self._credentials = credentials
        self._options = options
        self._clock = clock
        self._limiters: dict[str, anyio.CapacityLimiter] = {}

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        if service == "dynamodb" and operation in _COUNTS_CAPACITY:
            parameters = {"ReturnConsumedCapacity": "TOTAL", **parameters}
        call = partial(getattr(self._clients[service], operation), **parameters)
        limiter = self._limiter(service, operation)
        patience_ends = self._clock.monotonic() + PATIENCE
        for attempt in range(1, self._options.attempts + 1):
            began = self._clock.monotonic()
            try:
                answer: Answer = await anyio.to_thread.run_sync(call, limiter=limiter)
                _check_whole(service, answer)
            except ClientError as error:
                refused = _refusal(error, service, operation)
                if _is_server_error(refused, error):
                    self.stats.unanswered(service, self._clock.monotonic())
                else:
                    self.stats.answered(service)
                if not _is_passing(refused, error):
                    self.stats.calls[service, operation, "refused"] += 1
                    raise refused from None
                if refused.word in THROTTLES or THROTTLED_PARTS & set(refused.reasons):
                    self.stats.throttles[service, operation] += 1
                reason = refused.word
            except _UNANSWERED as error:
                self.stats.unanswered(service, self._clock.monotonic())
                reason = type(error).__name__
                if reason in _NO_CREDENTIALS:  # a client looks for credentials only once
                    self.stats.calls[service, operation, "failed"] += 1
                    break
            else:
                self.stats.answered(service)
                self.stats.calls[service, operation, "ok"] += 1
                self._count_capacity(operation, answer)
                if "Body" in answer:
                    answer["Body"] = _Body(answer["Body"], limiter, f"{service} {operation}")
                return answer
            finally:
                self.stats.took.observe(self._clock.monotonic() - began, service, operation)
            self.stats.calls[service, operation, "failed"] += 1
            if attempt == self._options.attempts or self._clock.monotonic() >= patience_ends:
                break
            self.stats.retries[service, operation] += 1
            await self._clock.sleep(self._pause(attempt))
        text = _describe_silence(service, operation, reason)
        raise ConveyorError(ErrorCode.UNAVAILABLE, text, retry_after=5)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        try:
            if not credentials_outlast(self._credentials, seconds):
                raise ShortLived(seconds)
            link: str = self._clients["s3"].generate_presigned_url(
                operation, Params=dict(parameters), ExpiresIn=seconds
            )
        except BotoCoreError as error:
            text = _describe_silence("s3", operation, type(error).__name__)
            raise ConveyorError(ErrorCode.UNAVAILABLE, text, retry_after=5) from None
        return link

    async def aclose(self) -> None:
        """Close all connections. No call may follow."""
        for client in self._clients.values():
            client.close()

    def _limiter(self, service: str, operation: str) -> anyio.CapacityLimiter:
        """Return the limit of a call's threads. Long polls have their own, or all others would
        wait for them."""
        name = "receive" if operation == "receive_message" else service
        if name not in self._limiters:
            options = self._options
            count = options.receive_threads if name == "receive" else options.threads
            self._limiters[name] = anyio.CapacityLimiter(count)
        return self._limiters[name]

    def _pause(self, attempt: int) -> float:
        options = self._options
        backoff = Backoff(2.0 * options.retry_base, options.retry_cap)
        return backoff.full_jitter(attempt, self._clock.random())

    def _count_capacity(self, operation: str, answer: Answer) -> None:
        consumed = answer.get("ConsumedCapacity")
        if not consumed:
            return
        parts = consumed if isinstance(consumed, list) else [consumed]
        units = sum(float(part.get("CapacityUnits", 0.0)) for part in parts)
        self.stats.capacity[operation] = self.stats.capacity.get(operation, 0.0) + units


class _Body:
    """A streamed body that is read in threads."""

    def __init__(self, stream: Any, limiter: anyio.CapacityLimiter, what: str) -> None:
        self._stream = stream
        self._limiter = limiter
        self._what = what

    async def read(self, most: int) -> bytes:
        try:
            read = partial(self._stream.read, most)
            piece: bytes = await anyio.to_thread.run_sync(read, limiter=self._limiter)
        except _UNANSWERED as error:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE,
                f"{self._what} broke off: {type(error).__name__}",
                retry_after=5,
            ) from None
        return piece

    def close(self) -> None:
        self._stream.close()


async def open_aws(options: AwsOptions, clock: Clock, *services: str) -> BotoAws:
    """Make clients of the services, in a thread: loading their descriptions takes a while."""
    clients, credentials = await anyio.to_thread.run_sync(_clients, options, services)
    return BotoAws(clients, options, clock, credentials=credentials)


def credentials_outlast(credentials: Credentials | None, seconds: int) -> bool:
    """Renew credentials that are about to expire; return True if they last for `seconds` more."""
    if not isinstance(credentials, RefreshableCredentials):
        return True
    # Renews them if it is time, as signing would: they are not renewed again for a while.
    credentials.get_frozen_credentials()
    return not credentials.refresh_needed(refresh_in=seconds)


_making = threading.Lock()


def _clients(
    options: AwsOptions, services: tuple[str, ...]
) -> tuple[dict[str, Any], Credentials | None]:
    config = Config(
        parameter_validation=False,
        retries={"mode": "standard", "total_max_attempts": 1},
        tcp_keepalive=True,
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        s3={"addressing_style": "path" if options.s3_endpoint else "auto"},
    )
    # boto3 clients are safe to use in several threads, but not to make.
    with _making:
        session = open_session(options.region)
        clients = {
            service: session.client(
                service,
                endpoint_url=options.endpoint(service),
                config=config.merge(_config(service, options)),
            )
            for service in services
        }
        if "s3" in clients:
            _send_bodies_at_once(clients["s3"])
        return clients, session.get_credentials()


_UPLOADS = ("PutObject", "UploadPart")


def _send_bodies_at_once(client: Any) -> None:
    """Let uploads go with their head, with a checksum in it and a signature over both.

    Over TLS a client sends file-like bodies otherwise, for which it takes all bodies: it asks first
    (`Expect`), then sends chunks that are not signed, and the checksum behind them. That takes one
    more round trip, and more than twice the CPU.
    """
    for upload in _UPLOADS:
        event = f"before-parameter-build.s3.{upload}"
        client.meta.events.unregister(event, convert_body_to_file_like_object)
        client.meta.events.register(event, _add_checksum)


def _add_checksum(params: dict[str, Any], **_event: Any) -> None:
    """Add the checksum of a body. S3 compares it, keeps it, and sends it to readers."""
    if isinstance(params.get("Body"), bytes):
        params["ChecksumCRC32"] = b64encode(crc32(params["Body"]).to_bytes(4, "big")).decode()


def open_session(region: str) -> boto3.session.Session:
    """Open a session whose clients raise ForeignAnswer for responses of another service."""
    core = botocore.session.get_session()
    core.register_component("response_parser_factory", AnswerParsers())
    return boto3.session.Session(region_name=region, botocore_session=core)


def _config(service: str, options: AwsOptions) -> Config:
    """Return the configuration of one service: a connection for each thread that may call it."""
    if service == "sqs":
        return Config(max_pool_connections=options.threads + options.receive_threads)
    if service == "s3":
        # Signature version 2 does not bind the Content-Type reliably.
        return Config(max_pool_connections=options.threads, signature_version="s3v4")
    return Config(max_pool_connections=options.threads)


def _describe_silence(service: str, operation: str, reason: str) -> str:
    """Say why there is no answer after the last attempt."""
    if reason in _NO_CREDENTIALS:
        return (
            "no AWS credentials found: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor a"
            " profile, nor a role of this machine"
        )
    if reason == "CredentialRetrievalError":
        return f"the AWS credentials could not be renewed, so {service} was not called"
    return f"{service} does not answer {operation}: {reason}"


def _check_whole(service: str, answer: Answer) -> None:
    """Raise ConnectionClosedError for an answer that was cut off within its headers.

    The HTTP library takes it for an answer without a body. S3 has answers without a body, with or
    without their length, so this cannot be seen there.
    """
    if service == "s3":
        return
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if not _LENGTHS & headers.keys():
        raise ConnectionClosedError(endpoint_url="")


def _refusal(error: ClientError, service: str, operation: str) -> AwsRefused:
    response = error.response
    details = response.get("Error", {})
    reasons = response.get("CancellationReasons", [])
    return AwsRefused(
        str(details.get("Code", "")),
        str(details.get("Message", "")),
        asked=(service, operation),
        item=response.get("Item"),
        reasons=tuple(str(reason.get("Code")) for reason in reasons),
        items=tuple(reason.get("Item") for reason in reasons),
    )


def _is_passing(refused: AwsRefused, error: ClientError) -> bool:
    """Return True if the same call may succeed a moment later."""
    if refused.word == "TransactionCanceledException":
        return set(refused.reasons) <= PASSING_REASONS
    return refused.word in PASSING or _is_server_error(refused, error)


def _is_server_error(refused: AwsRefused, error: ClientError) -> bool:
    """Return True if the service reports a failure of its own, other than throttling."""
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status >= 500 and refused.word not in THROTTLES


SAFE_TO_QUOTE = (
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    PartialCredentialsError,
    ProfileNotFound,
)
"""Errors that name only files, profiles and variables. Others may quote the output of a credential
program."""


async def open_clients(options: AwsOptions, clock: Clock, *services: str) -> BotoAws:
    """Make clients of the services; the caller closes them.

    Raises ConveyorError(unavailable) if the AWS profiles, files or variables are not usable.
    """
    try:
        return await open_aws(options, clock, *services)
    except BotoCoreError as error:
        why = str(error) if isinstance(error, SAFE_TO_QUOTE) else type(error).__name__
        text = f"the AWS configuration is not usable: {why}"
        raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None
