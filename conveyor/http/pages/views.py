"""Show records as HTML: the templates, and the functions that they format values with."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conveyor import __version__
from conveyor.domain.failure_groups import MOST_GROUPS
from conveyor.domain.result_shape import SIZE_BOUNDS
from conveyor.http.pages.bodies import fitting
from conveyor.http.pages.viewer import Viewer
from conveyor.service.page_schemas import RunPage, TaskDetails
from conveyor.service.schemas import FailureGroupBody, RunBody, ScheduleBody, StatsBody

HERE = Path(__file__).parent
ROOT = "/dashboard"
STATIC = f"{ROOT}/static"
SECTIONS = {
    "Overview": ROOT,
    "Jobs": f"{ROOT}/jobs",
    "Workers": f"{ROOT}/workers",
    "Webhooks": f"{ROOT}/webhooks",
    "Schedules": f"{ROOT}/schedules",
}
LETTERS = f"{ROOT}/dead-letters"
OF_OPERATORS = {"Dead letters": LETTERS}
"""Sections that operators alone are led to."""
LIVE = ("running", "pending")
UNENDED = ("pending", "processing")
"""States of tasks that have not ended."""
ATTEMPTS_SHOWN = 30
WORKERS_SHOWN = 40
LANES_SHOWN = 100
"""Lanes on one page, of all workers."""
NAME_BYTES, PAIR_BYTES = 600, 2_000
"""Bytes of a name and of a value in a mapping on a page, escaped."""
PAIRS_BYTES = 12_000
"""Bytes of the names and values of a mapping on a page, escaped."""
LONGEST_LINE = 20_000
"""Bytes of a line for a shell on a page, escaped: a longer one is left out, for a part of one could
do anything."""
LONGEST_ADDRESS = 8_000
"""Bytes of an address that a page links to itself by, escaped."""
PLACEHOLDER = "YOUR_VALUE"
"""Stands in a line for a shell where a value is masked."""
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A page to show: a template over a record. `section` names the section that it belongs to;
    `values` are further names for the template."""

    template: str
    title: str
    section: str
    page: msgspec.Struct
    status: int = 200
    values: Mapping[str, Any] | None = None


def render(
    screen: Screen, *, viewer: Viewer | None, path: str, query: str, origin: str, token: str
) -> str:
    """Show a screen as HTML; `path` and `query` are its address, its forms carry `token`."""
    json_address = f"{path}.json" + (f"?{query}" if query else "")
    if len(escape(json_address)) > LONGEST_ADDRESS:
        json_address = f"{path}.json"
    return _environment.get_template(screen.template).render(
        page=screen.page,
        title=screen.title,
        section=screen.section,
        sections=SECTIONS | OF_OPERATORS if viewer and viewer.operator else SECTIONS,
        viewer=viewer,
        version=__version__,
        origin=origin,
        static=STATIC,
        json_address=json_address,
        address=path,
        token=token,
        live=_live(screen.page),
        **(screen.values or {}),
    )


def _live(page: msgspec.Struct) -> dict[str, str]:
    """Return what the script of live numbers is to know of a page: the run that it is about, the
    state of that, and when an overview was made."""
    at = getattr(page, "at", "")
    run = getattr(page, "run", None)
    if not isinstance(run, RunBody):
        return {"live": "", **({"at": at} if at else {})}
    waits = run.waiting.reason if run.waiting else ""
    away = run.outage.shared if run.outage else ""
    return {"live": f"{run.job_id}/{run.run_id}", "shown": f"{state(run)} {waits} {away}"}


def job_path(job_id: str) -> str:
    """Return the address of a job's latest run."""
    return f"{ROOT}/jobs/{job_id}"


def run_path(run: RunBody) -> str:
    """Return the address of a run."""
    return f"{ROOT}/jobs/{run.job_id}/runs/{run.run_id}"


def with_query(path: str, **values: str | None) -> str:
    """Add the values that are set to an address."""
    query = urlencode({name: value for name, value in values.items() if value})
    return f"{path}?{query}" if query else path


def count(number: int) -> str:
    """Show a number with separators."""
    return f"{number:,}"


def size(number: int) -> str:
    """Show a number of bytes."""
    value = float(number)
    for unit in _UNITS[:-1]:
        if value < 1_024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1_024
    return f"{value:.1f} {_UNITS[-1]}"


def percent(part: float, whole: float) -> str:
    """Show a share in percent; neither the first nor the last ones of many are rounded away. The
    script of live numbers rounds alike."""
    share = 100 * part / whole if whole else 0.0
    tenths = math.floor(share * 10 + 0.5) / 10
    if 0 < share < 1:
        return f"{max(tenths, 0.1):.1f}%"
    if 99 < share < 100:
        return f"{min(tenths, 99.9):.1f}%"
    return f"{math.floor(share + 0.5)}%"


def duration(seconds: float) -> str:
    """Show a stretch of time in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 or not seconds else "under 1 s"
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    left = round(seconds)
    shown: list[str] = []
    for name, length in units:
        if left >= length or shown:
            shown.append(f"{left // length} {name}")
            left %= length
        if len(shown) == 2:
            break
    return " ".join(shown)


def pace(per_second: float) -> str:
    """Show a number of tasks a second, or a minute where they are few."""
    if per_second >= 1:
        return f"{per_second:,.1f}/s"
    return f"{per_second * 60:.1f}/min" if per_second else "none"


def utc(instant: str) -> str:
    """Show an instant of the wire for people, in UTC."""
    return f"{instant[:10]} {instant[11:19]} UTC"


def words(name: str) -> str:
    """Show a word of the API as text."""
    return name.replace("_", " ")


def state(run: RunBody) -> str:
    """Return the state of a run; a live one may be paused."""
    return "paused" if run.pause_state else run.status


def waiting(stats: StatsBody) -> int:
    """Return how many tasks have not ended."""
    return stats.total - stats.completed


def sizes(run: RunPage) -> list[tuple[str, int]]:
    """Name the size classes of a run's bodies."""
    bounds = [size(bound).replace(".0", "") for bound in SIZE_BOUNDS[1:]]
    names = ["empty", f"under {bounds[0]}"]
    names += [f"{low} to {high}" for low, high in zip(bounds, bounds[1:], strict=False)]
    names.append(f"{bounds[-1]} and more")
    return list(zip(names, run.shape.sizes, strict=True))


def statuses(groups: Sequence[FailureGroupBody]) -> list[tuple[int, int]]:
    """Sum up failure groups by their status, the most frequent first."""
    totals: dict[int, int] = {}
    for group in groups:
        if not group.status:
            continue
        totals[group.status] = totals.get(group.status, 0) + group.count
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))


def task_state(word: str, run: RunBody) -> str:
    """Return the state of a task; one that had not ended when its run did is at no work."""
    return "not_done" if word in UNENDED and run.status not in LIVE else word


def between(begin: str, end: str) -> float:
    """Return the seconds between two instants of the wire."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def sentence(text: str) -> str:
    """Write a text as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def pairs_of(values: Mapping[str, str]) -> dict[str, str]:
    """Choose the first of some values that a page has room for, each cut at PAIR_BYTES."""
    shown: dict[str, str] = {}
    left = PAIRS_BYTES
    for name, value in values.items():
        text = fitting(name, NAME_BYTES) + fitting(value, PAIR_BYTES)
        left -= len(escape(text).encode("utf-8", "replace"))
        if left < 0:
            break
        shown[name] = value
    return shown


def own_address(url: str, origin: str) -> str:
    """Leave our origin out of an address: the page may be open under another of our names, and
    browsers download from their own alone."""
    return url.removeprefix(origin) if url.startswith(f"{origin}/") else url


def submit_line(task: TaskDetails, origin: str) -> str | None:
    """Write the request of a task as a line for a shell, without a key and with a placeholder for
    each masked value; None if it is too long for a page."""
    request = task.request
    params = request.get("zenrows_params", {})
    if "custom_headers" in params:
        masked = dict.fromkeys(json.loads(params["custom_headers"]), PLACEHOLDER)
        request = {**request, "zenrows_params": {**params, "custom_headers": json.dumps(masked)}}
    body = json.dumps(request, ensure_ascii=False)
    line = (
        f"curl {shlex.quote(f'{origin}/v1/jobs')} -H 'X-API-Key: '\"$ZENROWS_API_KEY\" "
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
    return line if fitting(line, LONGEST_LINE) == line else None


def api_line(method: str, path: str, origin: str, body: str = "") -> str:
    """Write a call of the API as a line for a shell, without a key."""
    line = f"curl -X {method} {shlex.quote(origin + path)} -H 'X-API-Key: '\"$ZENROWS_API_KEY\""
    if not body:
        return line
    return f"{line} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def schedule_line(schedule: ScheduleBody) -> str:
    """Put a schedule in words."""
    zone = f" ({schedule.timezone})" if schedule.timezone else ""
    if schedule.at:
        return f"once, {schedule.at}{zone}"
    if schedule.rate:
        return f"every {schedule.rate.every} {schedule.rate.unit}"
    if not schedule.calendar:
        return "never"
    times = ", ".join(schedule.calendar.times_of_day)
    cadence = schedule.calendar.cadence
    if cadence.weekly:
        return f"{', '.join(cadence.weekly.days)} at {times}{zone}"
    if cadence.monthly:
        days = ", ".join(map(str, cadence.monthly.days))
        return f"on day {days} of the month at {times}{zone}"
    return f"daily at {times}{zone}"


_environment = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.globals |= {
    "ATTEMPTS_SHOWN": ATTEMPTS_SHOWN,
    "LANES_SHOWN": LANES_SHOWN,
    "LETTERS": LETTERS,
    "LIVE": LIVE,
    "LONGEST_LINE": LONGEST_LINE,
    "MOST_GROUPS": MOST_GROUPS,
    "NAME_BYTES": NAME_BYTES,
    "PAIR_BYTES": PAIR_BYTES,
    "PLACEHOLDER": PLACEHOLDER,
    "ROOT": ROOT,
    "WORKERS_SHOWN": WORKERS_SHOWN,
    "api_line": api_line,
    "between": between,
    "job_path": job_path,
    "own_address": own_address,
    "pairs_of": pairs_of,
    "run_path": run_path,
    "schedule_line": schedule_line,
    "sentence": sentence,
    "sizes": sizes,
    "statuses": statuses,
    "submit_line": submit_line,
    "task_state": task_state,
    "waiting": waiting,
    "with_query": with_query,
}
_environment.filters |= {
    "count": count,
    "duration": duration,
    "fitting": fitting,
    "pace": pace,
    "percent": percent,
    "size": size,
    "state": state,
    "utc": utc,
    "words": words,
}
