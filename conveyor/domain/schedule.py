"""Schedules: read one, and compute when it fires.

A `rate` counts in instants. `at` and `calendar` are wall-clock times in a zone: a time that a day
does not have is read with the offset before the gap (RFC 5545), and a time that a day has twice is
its first. The rules of zones come from the package tzdata alone, so that all machines agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from itertools import islice
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

import msgspec
import tzdata

from conveyor.domain.errors import ConveyorError, ErrorCode

ZONES_VERSION: str = tzdata.IANA_VERSION
"""The version of the zone rules."""
MOST_INTERVAL = 366 * 86_400_000
"""The longest interval of a rate, in milliseconds."""
MOST_ENTRIES = 100
"""Most times of day, and most days, that a calendar may name."""
MOST_ZONE_NAME = 64
"""Characters of a zone that is stored beside a rate, where nobody looks at it."""
MOST_HINTS = 3
"""Zones that a hint names at most."""
LEAST_LIKENESS = 0.8
"""The ratio of equal letters from which a name is taken for a slip of the pen."""
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
UNITS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
"""Milliseconds of each unit of a rate."""
_FIRST_YEAR = 1970
_AT = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?", re.ASCII)
_HOUR = re.compile(r"([01][0-9]|2[0-3]):00", re.ASCII)
_NEIGHBOURS = timedelta(days=2)
"""An instant in a day of a zone lies within so many days of it everywhere, also where a zone skips
a day."""


class Rate(msgspec.Struct, frozen=True):
    """Every so many units, from the anchor on."""

    every: int
    unit: str

    @property
    def interval(self) -> int:
        """The interval in milliseconds."""
        return self.every * UNITS[self.unit]


class Calendar(msgspec.Struct, frozen=True):
    """Full hours, on some days: of the week (0 is Monday) or of the month, else on all."""

    hours: tuple[int, ...]
    weekdays: tuple[int, ...] = ()
    month_days: tuple[int, ...] = ()

    def has(self, day: date) -> bool:
        """Return whether it fires on a day."""
        if self.weekdays:
            return day.weekday() in self.weekdays
        return not self.month_days or day.day in self.month_days


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `at` (as it was sent), `rate` and `calendar`, and the zone of their wall
    clock."""

    at: str | None = None
    rate: Rate | None = None
    calendar: Calendar | None = None
    timezone: str | None = None


@dataclass(frozen=True, slots=True)
class Fire:
    """One fire: its instant in milliseconds since the epoch, and its nominal local time, which
    identifies it; for a rate that is the instant in UTC. `note` says what the clock does then."""

    instant: int
    nominal: str
    note: str = ""


def parse_schedule(document: object) -> Schedule:
    """Read a JSON object; unknown fields are ignored, null counts as absent.

    Raises ConveyorError(invalid_argument), naming the field.
    """
    fields = _object(document, "schedule")
    given = [name for name in ("at", "rate", "calendar") if fields.get(name) is not None]
    if len(given) != 1:
        _refuse("schedule", "needs exactly one of at, rate and calendar")
    zone = fields.get("timezone")
    if given != ["rate"]:
        _check_zone(zone)
    elif zone is not None and (not isinstance(zone, str) or len(zone) > MOST_ZONE_NAME):
        _refuse("schedule.timezone", f"must be a name of at most {MOST_ZONE_NAME} characters")
    return Schedule(
        at=_at(fields["at"]) if given == ["at"] else None,
        rate=_rate(fields["rate"]) if given == ["rate"] else None,
        calendar=_calendar(fields["calendar"]) if given == ["calendar"] else None,
        timezone=zone,
    )


def next_fires(schedule: Schedule, *, after: int, anchor: int) -> Iterator[Fire]:
    """Yield the fires later than `after`, each later than the one before. A rate counts from
    `anchor`. All are milliseconds since the epoch. Ends with the year 9999."""
    if schedule.rate is not None:
        return _fires_of_rate(schedule.rate, after=after, anchor=anchor)
    zone = zone_of(schedule.timezone or "UTC")
    if schedule.at is not None:
        nominal = datetime.fromisoformat(schedule.at)
        # Beyond these years an instant may lie outside the calendar.
        is_near = _FIRST_YEAR <= nominal.year < datetime.max.year
        is_ahead = is_near and _instant(nominal, zone) > after
        return iter([_fire(nominal, zone)] if is_ahead else [])
    assert schedule.calendar is not None
    return _fires_of_calendar(schedule.calendar, zone, after=after)


def next_fire(schedule: Schedule, *, after: int, anchor: int) -> Fire | None:
    """Return the first of `next_fires`, None if there is none."""
    return next(next_fires(schedule, after=after, anchor=anchor), None)


def upcoming(schedule: Schedule, *, after: int, anchor: int, count: int) -> list[Fire]:
    """Return the first `count` of `next_fires`."""
    return list(islice(next_fires(schedule, after=after, anchor=anchor), count))


@lru_cache(maxsize=1_024)
def zone_of(name: str) -> ZoneInfo:
    """Return the rules of a zone. Raises KeyError for a name that tzdata does not list."""
    if name not in zone_names():
        raise KeyError(name)
    path = resources.files("tzdata").joinpath("zoneinfo", *name.split("/"))
    with path.open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def is_computable(schedule: Schedule) -> bool:
    """Return whether the present rules have the zone of a schedule; a rate needs none."""
    return schedule.rate is not None or (schedule.timezone or "UTC") in zone_names()


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    """Return the names of all zones."""
    return frozenset(resources.files("tzdata").joinpath("zones").read_text("ascii").split())


def local_time(instant: int, timezone: str | None) -> str:
    """Return an instant as the clock of a zone shows it, with its offset, in RFC 3339."""
    zone = UTC if timezone is None else zone_of(timezone)
    return datetime.fromtimestamp(instant / 1_000, zone).isoformat(timespec="seconds")


def _fires_of_rate(rate: Rate, *, after: int, anchor: int) -> Iterator[Fire]:
    passed = max(0, (after - anchor) // rate.interval)
    instant = anchor + (passed + 1) * rate.interval
    while instant < _END:
        yield Fire(instant, local_time(instant, None))
        instant += rate.interval


_END = int(datetime(9999, 12, 1, tzinfo=UTC).timestamp() * 1_000)


def _fires_of_calendar(calendar: Calendar, zone: ZoneInfo, *, after: int) -> Iterator[Fire]:
    """Yield fires day by day. A day that a zone skips falls onto the next one, so the fires of
    neighbouring days are put in order together."""
    day = datetime.fromtimestamp(after / 1_000, zone).date() - _NEIGHBOURS
    held: list[Fire] = []
    while day.year < 9_999:
        if calendar.has(day):
            held += [_fire(datetime.combine(day, time(hour)), zone) for hour in calendar.hours]
        day += timedelta(days=1)
        begins = _instant(datetime.combine(day - _NEIGHBOURS, time()), zone)
        held.sort(key=lambda fire: fire.instant)
        while held and held[0].instant < begins:
            fire = held.pop(0)
            if fire.instant > after:
                after = fire.instant
                yield fire


def _fire(nominal: datetime, zone: ZoneInfo) -> Fire:
    instant = _instant(nominal, zone)
    shown = datetime.fromtimestamp(instant / 1_000, zone)
    note = ""
    if shown.replace(tzinfo=None) != nominal:
        note = f"{nominal.time():%H:%M} does not exist on this day: it fires at {shown:%H:%M}"
        if shown.date() != nominal.date():
            missing = f"{nominal.time():%H:%M} does not exist on this day"
            if not _has_day(nominal.date(), zone):
                missing = "this day does not exist"
            note = f"{missing}: it fires on {shown:%Y-%m-%d} at {shown:%H:%M}"
    elif _instant(nominal.replace(fold=1), zone) != instant:
        note = f"{nominal.time():%H:%M} exists twice on this day: it fires at the first"
    return Fire(instant, nominal.isoformat(), note)


def _has_day(day: date, zone: ZoneInfo) -> bool:
    """Return whether a zone has a day: one that skips it goes on with the next."""
    begins = _instant(datetime.combine(day, time()), zone)
    return datetime.fromtimestamp(begins / 1_000, zone).date() == day


def _instant(nominal: datetime, zone: ZoneInfo) -> int:
    # Of a time in a gap, `fold` 0 takes the offset before it; of one that exists twice, the first.
    return round(nominal.replace(tzinfo=zone).timestamp() * 1_000)


def _at(value: object) -> str:
    if not isinstance(value, str) or not _AT.fullmatch(value):
        _refuse("schedule.at", "must be YYYY-MM-DDTHH:MM[:SS], without Z and without an offset")
    try:
        year = datetime.fromisoformat(value).year
    except ValueError:
        _refuse("schedule.at", "is no date and time")
    if year >= datetime.max.year:
        _refuse("schedule.at", f"must lie before the year {datetime.max.year}")
    return value


def _rate(value: object) -> Rate:
    fields = _object(value, "schedule.rate")
    every, unit = fields.get("every"), fields.get("unit")
    if not isinstance(unit, str) or unit not in UNITS:
        _refuse("schedule.rate.unit", f"must be one of {', '.join(UNITS)}")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        _refuse("schedule.rate.every", "must be a whole number from 1 on")
    if every * UNITS[unit] > MOST_INTERVAL:
        _refuse("schedule.rate.every", "must make at most 366 days")
    return Rate(every, unit)


def _calendar(value: object) -> Calendar:
    fields = _object(value, "schedule.calendar")
    times = _list(fields.get("times_of_day"), "schedule.calendar.times_of_day")
    hours = []
    if len(times) > MOST_ENTRIES:
        _refuse("schedule.calendar.times_of_day", f"must have at most {MOST_ENTRIES} entries")
    for number, text in enumerate(times):
        if not isinstance(text, str) or not _HOUR.fullmatch(text):
            _refuse(
                f"schedule.calendar.times_of_day[{number}]", "must be a full hour such as 09:00"
            )
        hours.append(int(text[:2]))
    cadence = _object(fields.get("cadence"), "schedule.calendar.cadence")
    given = [name for name in ("daily", "weekly", "monthly") if cadence.get(name) is not None]
    if len(given) != 1:
        _refuse("schedule.calendar.cadence", "needs exactly one of daily, weekly and monthly")
    [kind] = given
    place = f"schedule.calendar.cadence.{kind}"
    chosen = _object(cadence[kind], place)
    hours = sorted(set(hours))
    if kind == "daily":
        return Calendar(tuple(hours))
    days = _list(chosen.get("days"), f"{place}.days")
    if len(days) > MOST_ENTRIES:
        _refuse(f"{place}.days", f"must have at most {MOST_ENTRIES} entries")
    if kind == "weekly":
        return Calendar(tuple(hours), weekdays=_weekdays(days, f"{place}.days"))
    return Calendar(tuple(hours), month_days=_month_days(days, f"{place}.days"))


def _weekdays(days: list[Any], place: str) -> tuple[int, ...]:
    for number, day in enumerate(days):
        if not isinstance(day, str) or day not in WEEKDAYS:
            _refuse(f"{place}[{number}]", f"must be one of {', '.join(WEEKDAYS)}")
    return tuple(sorted({WEEKDAYS.index(day) for day in days}))


def _month_days(days: list[Any], place: str) -> tuple[int, ...]:
    for number, day in enumerate(days):
        if not isinstance(day, int) or isinstance(day, bool) or not 1 <= day <= 31:
            _refuse(f"{place}[{number}]", "must be a whole number from 1 to 31")
    return tuple(sorted(set(days)))


def _check_zone(value: object) -> None:
    place = "schedule.timezone"
    if value is None:
        _refuse(place, "is needed beside at and calendar")
    if not isinstance(value, str) or value not in zone_names():
        near = _near_zones(value) if isinstance(value, str) else []
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        _refuse(place, f"must be the name of a zone, such as Europe/Berlin{hint}")


def _near_zones(name: str) -> list[str]:
    """Return the zones that a wrong name may mean: the same in other letters, its last part, or one
    with a slip of the pen."""
    wanted = "_".join(name[:MOST_ZONE_NAME].casefold().split())
    folded = {zone.casefold(): zone for zone in sorted(zone_names())}
    if wanted in folded:
        return [folded[wanted]]
    # The sign of Etc/GMT+1 is the other way round, and no offset is near another one.
    if any(letter.isdigit() for letter in wanted):
        return []
    parts: dict[str, list[str]] = {}
    for zone in sorted(zone_names()):
        if not zone.startswith("Etc/"):
            parts.setdefault(zone.rpartition("/")[2].casefold(), []).append(zone)
    if wanted in parts:
        return parts[wanted][:MOST_HINTS]
    if near := get_close_matches(wanted, folded, 1, LEAST_LIKENESS):
        return [folded[near[0]]]
    near = get_close_matches(wanted, parts, 1, LEAST_LIKENESS)
    return parts[near[0]][:MOST_HINTS] if near else []


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(place, "must be a JSON object")
    return value


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        _refuse(place, "must be a list with at least one entry")
    return value


def _refuse(place: str, problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{place}: {problem}")
