"""Refusals caused by the deployment: missing permissions, bad credentials, missing resources.

No caller can fix them, and no retry succeeds until the operator does. So callers only see that the
service is unavailable, and the operator reads in the log what is wrong.
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
"""The error code by which a service says that the table or bucket does not exist."""

ENCRYPTION = "KMS."
"""The prefix of the error codes by which a service says that it cannot use its KMS key."""

_log = logging.getLogger("conveyor.aws")


class NotDeployed(ConveyorError):
    """ConveyorError(unavailable) with a `problem`: one line for the operator and the log.

    Callers never see the problem.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            "the service is misconfigured; its operator has been told",
            retry_after=5,
        )
        self.args = (problem,)
        self.problem = problem


def describe(refused: AwsRefused) -> str:
    """Describe a refusal in one line for the operator: the service, the operation, the reason."""
    service, operation = refused.asked
    return f"{service} refuses {operation}: {_why(refused)}"


def _why(refused: AwsRefused) -> str:
    if refused.word in DENIED:
        return f"not permitted: {refused.message or refused.word}"
    if refused.word in UNKNOWN_CREDENTIALS:
        return f"the credentials are not accepted: {refused.word}"
    if refused.word.startswith(ENCRYPTION):
        return f"its KMS key cannot be used: {refused.message or refused.word}"
    if not refused.message:
        return refused.word
    return f"{refused.word}{' ' if refused.word.isdigit() else ': '}{refused.message}"


class DeployedAws:
    """An `Aws` that wraps another one and names the deployed resources in its errors.

    `resources` names the resource of each service, such as {"dynamodb": "table conveyor"}. A
    resource that is gone, or credentials that a service does not accept, count in `stats` as a
    service that is away.
    """

    def __init__(
        self, aws: Aws, stats: CallStats, clock: Clock, *, resources: Mapping[str, str]
    ) -> None:
        self._aws = aws
        self._stats = stats
        self._clock = clock
        self._resources = resources

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Also log and raise NotDeployed if the operator has to fix the deployment."""
        try:
            answer = await self._aws.call(service, operation, parameters)
        except AwsRefused as refused:
            problem = self._problem(service, operation, refused)
            if problem is None:
                raise
            _log.error(problem)
            raise NotDeployed(problem) from None
        self._stats.count_parts(service, operation, answer)
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)

    def _problem(self, service: str, operation: str, refused: AwsRefused) -> str | None:
        if service not in self._resources:
            return None
        if refused.word == ABSENCES.get(service):
            self._stats.unusable(service, self._clock.monotonic())
            return f"there is no {self._resources[service]} (conveyor admin init makes it)"
        if refused.word in UNKNOWN_CREDENTIALS:
            self._stats.unusable(service, self._clock.monotonic())
        elif refused.word not in DENIED and not refused.word.startswith(ENCRYPTION):
            return None
        return f"{self._resources[service]}: {operation}: {_why(refused)}"
