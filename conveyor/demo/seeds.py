"""`conveyor-dev --seed`: fill an empty data directory with jobs and their outcomes.

A server of its own, on a clock that is moved by hand and over a gateway that answers as the seed
says, works the jobs in a temporary directory; a copy of that is what the server begins with. So
instants, ids and bodies are those of the seed, and nothing is left of a seed that was cut off.
"""

from __future__ import annotations

import signal
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

import anyio
import msgspec
from anyio import to_process

from conveyor.aio.concurrency import first_error
from conveyor.client.api import Api, connect
from conveyor.client.errors import ClientError
from conveyor.clock import ManualClock, SystemClock
from conveyor.dev.copies import check_empty, load_copy, save_copy
from conveyor.dev.directory import open_at_once
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import parse_rfc3339, quoted
from conveyor.gateway.fake import Behaviour, FakeGateway, is_understood
from conveyor.http.routes_dev import duration
from conveyor.ports.gateway import ScrapeRequest, Success
from conveyor.roles.dev import SYSTEM, ClockChoice, ServerInfo, serve
from conveyor.settings import Settings, load

DEMO = "demo"
STATES = ("finished", "running", "paused")
WORKED = 60.0
"""Seconds for which jobs are worked that are to be running or paused."""
_START = "2026-11-02T08:00:00Z"
_MOST = 1_000_000
_WORKERS = 500


@dataclass(frozen=True, slots=True)
class SeedJob:
    """A job of a seed: its body as the API takes it, the state that it is left in, and the answers
    by URL, as words of the fake gateway."""

    body: Mapping[str, Any]
    state: str
    answers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Seed:
    """A file of jobs. They begin at `start`, in milliseconds; `advance` seconds pass between those
    that are left finished and the others."""

    name: str
    start: int
    advance: float
    jobs: tuple[SeedJob, ...]


def read_seed(name: str, *, start: str = "") -> Seed:
    """Read the seed `demo` or a file. Raises ConveyorError(invalid_argument) with the name of the
    file, and the number of the job, for what cannot be read; OSError."""
    path = Path(__file__).with_name("demo.toml") if name == DEMO else Path(name)
    try:
        with open_at_once(path) as file:
            content = tomllib.loads(file.read().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # Also a number of thousands of digits, or nesting without an end.
        _refuse(name, str(error))
    try:
        _check_words(content, {"start", "advance", "jobs"})
        jobs = content.get("jobs")
        if not isinstance(jobs, list) or not jobs:
            raise ValueError("it has no [[jobs]]")
        begin = _instant(start or content.get("start", _START))
        seconds = duration("advance", content.get("advance", 0))
    except ValueError as error:
        _refuse(name, str(error))
    except ConveyorError as error:
        _refuse(name, error.detail)
    return Seed(name, begin, seconds, tuple(_job(name, *one) for one in enumerate(jobs, start=1)))


def _instant(value: object) -> int:
    try:
        return parse_rfc3339(value if isinstance(value, str) else "")
    except (ValueError, msgspec.ValidationError):
        raise ValueError("start is a text such as 2027-03-01T08:00:00Z") from None


def _job(name: str, number: int, given: object) -> SeedJob:
    try:
        if not isinstance(given, dict):
            raise ValueError("must be a table")
        state = given.get("state", "finished")
        if state not in STATES:
            raise ValueError(f"state is one of {', '.join(STATES)}, not {quoted(state)}")
        tasks: list[dict[str, Any]] = []
        answers: dict[str, str] = {}
        entries = given.get("tasks", [])
        if not isinstance(entries, list):
            raise ValueError("its tasks are tables: [[jobs.tasks]]")
        for entry in entries:
            _add_tasks(entry, tasks, answers)
    except ValueError as error:
        _refuse(name, f"job {number}: {error}")
    # Those of a year: a seed is looked at long after its instants.
    body = {"result_ttl_days": 365, **given, "tasks": tasks}
    body.pop("state", None)
    return SeedJob(body, state, answers)


def _add_tasks(entry: object, tasks: list[dict[str, Any]], answers: dict[str, str]) -> None:
    """Write an entry of a file out into tasks, and note their answers. Raises ValueError."""
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise ValueError("each of its tasks is a table with a url")
    count, answer = entry.get("count", 1), entry.get("answer", {})
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST:
        raise ValueError(f"count is a whole number from 1 to {_MOST:,}, not {quoted(count)}")
    if not isinstance(answer, dict):
        raise ValueError("answer is a table of words of the fake gateway")
    _check_words(answer, set(Behaviour.__struct_fields__))
    words = {
        word: str(int(value)) if isinstance(value, bool) else str(value)
        for word, value in answer.items()
    }
    for word, value in words.items():
        if not is_understood(word, value):
            raise ValueError(f"the fake gateway takes no {word} = {quoted(value)}")
    fields = {word: value for word, value in entry.items() if word not in ("count", "answer")}
    for number in range(1, count + 1):
        url = entry["url"].replace("{n}", str(number))
        tasks.append({**fields, "url": url})
        if words:
            answers[url] = f"{url}{'&' if '?' in url else '?'}{urlencode(words)}"


def _check_words(table: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ValueError(f"{quoted(unknown[0])} is none of {', '.join(sorted(known))}")


def _refuse(name: str, problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"the seed {name}: {problem}")


class SeedGateway(FakeGateway):
    """The fake gateway; what a URL is to get may stand in the seed instead of its query."""

    def __init__(self, clock: ManualClock, answers: Mapping[str, str]) -> None:
        super().__init__(clock, keeps_hits=False)
        self._answers = answers

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        scripted = self._answers.get(request.url, request.url)
        return super().scrape(msgspec.structs.replace(request, url=scripted))


def plant(
    seed: Seed,
    settings: Settings,
    api_key: str,
    *,
    clock: ClockChoice,
    scratch: Path | None = None,
) -> None:
    """Fill the data directory of the settings, which must be empty; the jobs are those of an API
    key. A server on a clock that is moved goes on from the seed's last instant. It is played in a
    folder below `scratch`, or else where temporary files belong.

    Raises ConveyorError, and leaves the directory as it was.
    """
    _check_gateway(settings)
    directory = Path(settings.data_dir)
    check_empty(directory)
    with tempfile.TemporaryDirectory(prefix="conveyor-seed-", dir=scratch) as folder:
        file = Path(folder) / "copy.tar"
        try:
            anyio.run(_play, seed, _own_settings(settings, Path(folder) / "data"), api_key, file)
        except ExceptionGroup as group:
            raise first_error(group, prefer=ConveyorError) from None
        load_copy(file, directory)
    if clock.mode == "system":
        (directory / "clock").unlink()


async def plant_apart(settings: Settings, api_key: str) -> None:
    """Fill a data directory with the demo, in a process of its own: it takes all of a processor.

    It plays beside the directory, so that whoever made the folder around that removes what a
    process that was ended leaves. Raises ConveyorError."""
    _check_gateway(settings)
    await to_process.run_sync(_plant_demo, settings, api_key, cancellable=True)


def _plant_demo(settings: Settings, api_key: str) -> None:
    # Ctrl-C is for the server, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    beside = Path(settings.data_dir).parent
    plant(read_seed(DEMO), settings, api_key, clock=SYSTEM, scratch=beside)


def _check_gateway(settings: Settings) -> None:
    if settings.gateway != "fake":
        text = "a seed needs --gateway fake: its answers are not those of real sites"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)


def _own_settings(settings: Settings, directory: Path) -> Settings:
    """Make the settings of the server that works a seed: the same whatever flags are given, but
    for the root secret and the origin of links in events."""
    origin = f"http://{settings.host}:{settings.port or 9_000}"
    own = load({}, data_dir=str(directory), port=0, gateway="fake", workers=_WORKERS)
    return replace(
        own,
        secret=settings.secret,
        public_url=settings.public_url or origin,
        shutdown_grace=0.0,
        max_inline_tasks=_MOST,
    )


async def _play(seed: Seed, settings: Settings, api_key: str, file: Path) -> None:
    """Work a seed in a directory of its own, and copy that into a file while its clock stands."""
    clock = ManualClock(start=seed.start)
    answers = {url: scripted for job in seed.jobs for url, scripted in job.answers.items()}
    ready = anyio.Event()
    infos: list[ServerInfo] = []

    def note(info: ServerInfo) -> None:
        infos.append(info)
        ready.set()

    async def run() -> None:
        gateway = SeedGateway(clock, answers)
        await serve(settings, on_ready=note, gateway=gateway, clock=clock)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await ready.wait()
        await clock.advance(0)
        async with connect(infos[0].api, api_key, SystemClock()) as api:
            await _work(seed, api, clock)
        save_copy(Path(settings.data_dir), file, SystemClock())
        group.cancel_scope.cancel()


async def _work(seed: Seed, api: Api, clock: ManualClock) -> None:
    for number, job in enumerate(seed.jobs, start=1):
        if job.state == "finished":
            await _submit(seed, number, job, api)
            await clock.run_until_idle()
    await clock.advance(seed.advance)
    await clock.run_until_idle()
    left = {
        await _submit(seed, number, job, api): job.state
        for number, job in enumerate(seed.jobs, start=1)
        if job.state != "finished"
    }
    if left:
        await clock.advance(WORKED)
    for job_id, state in left.items():
        if state == "paused":
            await api.change_run(job_id, "pause")
            await clock.advance(0)


async def _submit(seed: Seed, number: int, job: SeedJob, api: Api) -> str:
    try:
        made, _ = await api.submit(job.body, idempotency_key=f"seed-{number}")
    except ClientError as error:
        _refuse(seed.name, f"job {number}: {error}")
    return made.job_id
