"""Open calls to AWS, over the carriers that the options name."""

from __future__ import annotations

from typing import Any

import anyio.to_thread
from botocore.credentials import Credentials
from botocore.exceptions import (
    BotoCoreError,
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    PartialCredentialsError,
    ProfileNotFound,
)

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.boto import BotoCarrier, make_clients
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.http import HttpCarrier

SAFE_TO_QUOTE = (
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    PartialCredentialsError,
    ProfileNotFound,
)
"""Errors that name only files, profiles and variables. Others may quote the output of a credential
program."""


async def open_aws(options: AwsOptions, clock: Clock, *services: str) -> AwsClient:
    """Make clients of the services, in a thread: loading their descriptions takes a while."""
    clients, credentials = await anyio.to_thread.run_sync(make_clients, options, services)
    return over_clients(clients, options, clock, credentials=credentials)


def over_clients(
    clients: dict[str, Any],
    options: AwsOptions,
    clock: Clock,
    *,
    credentials: Credentials | None,
) -> AwsClient:
    """Make calls over the clients of boto3 that there are, and the credentials that they use."""
    boto = BotoCarrier(clients, options, credentials=credentials)
    if options.carrier == "boto":
        return AwsClient(boto, options, clock)
    # AWS compares the instant of a signature with its own time, whatever the clock of the caller.
    carrier = HttpCarrier(boto, options, SystemClock(), credentials=credentials)
    return AwsClient(carrier, options, clock)


async def open_clients(options: AwsOptions, clock: Clock, *services: str) -> AwsClient:
    """Make clients of the services; the caller closes them.

    Raises ConveyorError(unavailable) if the AWS profiles, files or variables are not usable.
    """
    try:
        return await open_aws(options, clock, *services)
    except BotoCoreError as error:
        why = str(error) if isinstance(error, SAFE_TO_QUOTE) else type(error).__name__
        text = f"the AWS configuration is not usable: {why}"
        raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None
