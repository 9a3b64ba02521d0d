"""Show when a schedule fires."""

from __future__ import annotations

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.schedule import (
    ZONES_VERSION,
    Fire,
    Schedule,
    local_time,
    parse_schedule,
    upcoming,
)
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.clock import Clock
from conveyor.service.schemas import FireBody, SchedulePreviewBody, present

PREVIEWED = 10
"""Fires that a preview shows."""


class Schedules:
    """Shows the fires of schedules that are not saved."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def preview(self, body: bytes) -> SchedulePreviewBody:
        """Show the next fires of the schedule in a JSON document, as if it were saved now.

        Raises ConveyorError(invalid_argument), naming the field; also for a single time that has
        passed.
        """
        schedule = parse_schedule(strict_json.decode(body))
        now = self._clock.now()
        fires = upcoming(schedule, after=now, anchor=now, count=PREVIEWED)
        if schedule.at is not None and not fires:
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "schedule.at: has passed")
        return SchedulePreviewBody(
            zones_version=ZONES_VERSION, fires=[_shown(fire, schedule) for fire in fires]
        )


def _shown(fire: Fire, schedule: Schedule) -> FireBody:
    zone = None if schedule.rate is not None else schedule.timezone
    return FireBody(
        at=rfc3339(fire.instant),
        local_time=local_time(fire.instant, zone),
        note=present(fire.note or None),
    )
