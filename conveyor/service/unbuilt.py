"""What a submit may ask for that this version does not do yet."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.submission import JobRequest


def not_implemented(what: str) -> ConveyorError:
    """The refusal of a feature that is reserved in the contract."""
    return ConveyorError(ErrorCode.NOT_IMPLEMENTED, f"{what} are not implemented yet")


def refuse_unbuilt(request: JobRequest) -> None:
    """Raises ConveyorError(not_implemented) for the first reserved feature that is asked for."""
    if request.type != "regular" or request.has_schedule:
        raise not_implemented("scheduled jobs")
    if request.has_webhook:
        raise not_implemented("webhooks")
