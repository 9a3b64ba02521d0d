"""Refusals that concern the deployment, not what was asked: rights, credentials, things not there.

Nobody who sent a request can mend them, and nothing that is made again goes well until somebody
does. So to callers a service is unavailable, and whoever runs the fleet is told what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, CallStats, Parameters

DENIED = frozenset(
    {"AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation", "403"}
)
UNKNOWN_CREDENTIALS = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "InvalidSignatureException",
        "UnrecognizedClientException",
    }
)
ABSENCES = {"dynamodb": "ResourceNotFoundException", "s3": "NoSuchBucket"}
"""How a service says that the one thing which it was asked about is not there at all."""

ENCRYPTION = "KMS."
"""How the words begin by which a service says that it cannot use the key of KMS it encrypts by."""

_log = logging.getLogger("conveyor.aws")


class NotDeployed(ConveyorError):
    """ConveyorError(unavailable) with a `problem`: one line for whoever runs the fleet, which is
    its text in a log as well. Callers are told nothing of it."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE, "the service lacks something of its own", retry_after=5
        )
        self.args = (problem,)
        self.problem = problem


def describe(refused: AwsRefused) -> str:
    """A refusal in one line for whoever runs the fleet: who refuses what, and why."""
    service, operation = refused.asked
    return f"{service} refuses {operation}: {_why(refused)}"


def _why(refused: AwsRefused) -> str:
    if refused.word in DENIED:
        return f"not permitted: {refused.message or refused.word}"
    if refused.word in UNKNOWN_CREDENTIALS:
        return f"the credentials are not accepted: {refused.word}"
    if refused.word.startswith(ENCRYPTION):
        return f"its key of KMS cannot be used: {refused.message or refused.word}"
    if not refused.message:
        return refused.word
    return f"{refused.word}{' ' if refused.word.isdigit() else ': '}{refused.message}"


class DeployedAws:
    """An `Aws` before another one, which knows by name what was deployed.

    `things` names what each service is asked about, such as {"dynamodb": "table conveyor"}. A thing
    that is gone, and credentials that are not accepted, count in `stats` as a service that is away.
    """

    def __init__(
        self, aws: Aws, stats: CallStats, clock: Clock, *, things: Mapping[str, str]
    ) -> None:
        self._aws = aws
        self._stats = stats
        self._clock = clock
        self._things = things

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call; see `Aws.call`. Raises NotDeployed where the deployment has to be
        mended, which is logged, too."""
        try:
            return await self._aws.call(service, operation, parameters)
        except AwsRefused as refused:
            problem = self._problem(service, operation, refused)
            if problem is None:
                raise
            _log.error(problem)
            raise NotDeployed(problem) from None

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """A link; see `Aws.presign`."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    def _problem(self, service: str, operation: str, refused: AwsRefused) -> str | None:
        if service not in self._things:
            return None
        if refused.word == ABSENCES.get(service):
            self._stats.unusable(service, self._clock.monotonic())
            return f"there is no {self._things[service]} (conveyor admin init makes it)"
        if refused.word in UNKNOWN_CREDENTIALS:
            self._stats.unusable(service, self._clock.monotonic())
        elif refused.word not in DENIED and not refused.word.startswith(ENCRYPTION):
            return None
        return f"{self._things[service]}: {operation}: {_why(refused)}"
