"""One try of a call to AWS, and what becomes of it.

A carrier sends one request and reads its answer. It knows nothing of further tries, of the counts
of calls, or of capacity: `client.AwsClient` makes the tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from botocore.exceptions import ClientError

from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters

NOT_RENEWED = "CredentialRetrievalError"
"""The reason if keys have ended, and there are no others."""
NO_TURN = "NoTurn"
"""The reason if all connections of a kind of call stayed in use."""
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})
"""Reasons after which no further try is made: credentials are looked for only once."""


class Unanswered(Exception):
    """A try got no answer of the service. `reason` is the name of the error, as botocore has it.

    `is_silence` is False if the service was not asked: this process had no turn for the call.
    """

    def __init__(self, reason: str, *, is_silence: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_silence = is_silence


class Carrier(Protocol):
    """Makes single tries of calls to AWS."""

    async def once(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Send a call once, and return the answer. A streamed body is an AnswerBody.

        What was begun is carried to its end even if the caller is cancelled: a release that follows
        a cancelled claim must not overtake it. Raises AwsRefused if the service refuses, with the
        status of the answer; Unanswered if no answer of the service came.
        """
        ...

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Return a link, as `Aws.presign` does. Raises the same."""
        ...

    async def aclose(self) -> None:
        """Close all connections. No call may follow."""
        ...


def read_refusal(response: Mapping[str, Any], status: int, asked: tuple[str, str]) -> AwsRefused:
    """Build a refusal from the parsed answer that carries it."""
    details = response.get("Error", {})
    reasons = response.get("CancellationReasons") or []
    return AwsRefused(
        str(details.get("Code", "")),
        str(details.get("Message", "")),
        asked=asked,
        status=status,
        item=response.get("Item"),
        reasons=tuple(str(reason.get("Code")) for reason in reasons),
        items=tuple(reason.get("Item") for reason in reasons),
    )


def read_client_error(error: ClientError, asked: tuple[str, str]) -> AwsRefused:
    """Build a refusal from the error by which boto3 tells it: of the call, or of a renewal of the
    credentials for it."""
    response: Any = error.response
    status: int = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return read_refusal(response, status, asked)


def describe_silence(service: str, operation: str, reason: str) -> str:
    """Say why there is no answer after the last try."""
    if reason in NO_CREDENTIALS:
        return (
            "no AWS credentials found: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor a"
            " profile, nor a role of this machine"
        )
    if reason == NO_TURN:
        return f"all connections for {operation} are in use, so {service} was not called"
    if reason == NOT_RENEWED:
        return f"the AWS credentials could not be renewed, so {service} was not called"
    return f"{service} does not answer {operation}: {reason}"
