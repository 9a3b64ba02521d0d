"""Opening clients of AWS, and what this machine's configuration of them lacks."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    PartialCredentialsError,
    ProfileNotFound,
)

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.boto import BotoAws, open_aws
from conveyor.prod.aws.options import AwsOptions

NAMES_NO_SECRET = (
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    PartialCredentialsError,
    ProfileNotFound,
)
"""Errors that name files, profiles and variables. What a program for credentials printed may stand
in others."""


async def open_clients(options: AwsOptions, clock: Clock, *services: str) -> BotoAws:
    """Clients of the services, to be closed. Raises ConveyorError(unavailable) where profiles,
    files or variables of AWS do not make any."""
    try:
        return await open_aws(options, clock, *services)
    except BotoCoreError as error:
        why = str(error) if isinstance(error, NAMES_NO_SECRET) else type(error).__name__
        raise ConveyorError(ErrorCode.UNAVAILABLE, f"no client of AWS can be made: {why}") from None
