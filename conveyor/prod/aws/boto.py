"""Tries of calls to AWS through boto3: low-level clients in threads, so that no call blocks the
event loop.

boto3 itself makes one try and validates no parameters: walking every attribute costs as much CPU as
all the rest of a batch write.
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
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError
from botocore.handlers import convert_body_to_file_like_object
from urllib3.exceptions import HTTPError

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.answers import AnswerParsers, ForeignAnswer
from conveyor.prod.aws.calls import Answer, AwsOptions, Parameters, ShortLived
from conveyor.prod.aws.carriers import (
    NOT_RENEWED,
    Unanswered,
    describe_silence,
    read_client_error,
)

_LENGTHS = frozenset({"content-length", "transfer-encoding"})
_UNANSWERED = (BotoCoreError, ForeignAnswer, HTTPError)
"""Errors of a call that got no answer. boto3 lets errors of the HTTP library pass if the body of a
refusal is cut off and the body of a success would have been streamed."""


class BotoCarrier:
    """A `Carrier` over boto3."""

    def __init__(
        self,
        clients: dict[str, Any],
        options: AwsOptions,
        *,
        credentials: Credentials | None = None,
    ) -> None:
        self.clients = clients
        self._credentials = credentials
        self._options = options
        self._limiters: dict[str, anyio.CapacityLimiter] = {}

    async def once(self, service: str, operation: str, parameters: Parameters) -> Answer:
        call = partial(getattr(self.clients[service], operation), **parameters)
        limiter = self._limiter(service, operation)
        try:
            answer: Answer = await anyio.to_thread.run_sync(call, limiter=limiter)
            _check_whole(service, answer)
        except ClientError as error:
            raise read_client_error(error, (service, operation)) from None
        except _UNANSWERED as error:
            raise Unanswered(type(error).__name__) from None
        if "Body" in answer:
            answer["Body"] = _Body(answer["Body"], limiter, f"{service} {operation}")
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        try:
            if not credentials_outlast(self._credentials, seconds):
                raise ShortLived(seconds)
            link: str = self.clients["s3"].generate_presigned_url(
                operation, Params=dict(parameters), ExpiresIn=seconds
            )
        except (BotoCoreError, ClientError) as error:
            is_refused = isinstance(error, ClientError)  # the renewal was: a link asks nobody
            reason = NOT_RENEWED if is_refused else type(error).__name__
            text = describe_silence("s3", operation, reason)
            raise ConveyorError(ErrorCode.UNAVAILABLE, text, retry_after=5) from None
        return link

    async def aclose(self) -> None:
        for client in self.clients.values():
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


def credentials_outlast(credentials: Credentials | None, seconds: int) -> bool:
    """Renew credentials that are about to expire; return True if they last for `seconds` more."""
    if not isinstance(credentials, RefreshableCredentials):
        return True
    # Renews them if it is time, as signing would: they are not renewed again for a while.
    credentials.get_frozen_credentials()
    return not credentials.refresh_needed(refresh_in=seconds)


_making = threading.Lock()


def make_clients(
    options: AwsOptions, services: tuple[str, ...]
) -> tuple[dict[str, Any], Credentials | None]:
    """Make clients of the services, and find the credentials that they use."""
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
        credentials = session.get_credentials()
        _use_to_their_end(credentials)
        return clients, credentials


def _use_to_their_end(credentials: Credentials | None) -> None:
    """Let keys that cannot be renewed sign until they end: botocore would not sign with them in
    their last ten minutes, although each service takes them."""
    if isinstance(credentials, RefreshableCredentials):
        credentials._mandatory_refresh_timeout = 0


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
