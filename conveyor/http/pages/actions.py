"""Actions of pages: forms that change jobs, as the API does it for the caller of the job.

A form is taken with the token of a page of the same viewer alone, and leads back to a page. Whoever
sees all callers acts under the caller of each job; what an operator does is a line in the log.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qsl

from msgspec import UNSET, Struct, UnsetType, structs
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.middleware import request_id_of
from conveyor.http.pages.routes import EXPORT, Dashboard, PageCall, SignInPage, job_search
from conveyor.http.pages.session import SIGN_IN, SIGN_OUT, Sessions
from conveyor.http.pages.views import LETTERS, ROOT, Screen, api_line, with_query
from conveyor.http.request import json_response, read_body
from conveyor.ports.exports import ExportFormat
from conveyor.service.callers import Caller
from conveyor.service.overview import MOST_LOOKED
from conveyor.service.page_schemas import JobsFound
from conveyor.service.reruns import parse_choice
from conveyor.service.responses import ACTIVE, PAUSED
from conveyor.service.service import Service

MOST_FORM = 65_536
"""Bytes of a form."""

_log = logging.getLogger("conveyor.http")


@dataclass(frozen=True, slots=True)
class ActionCall(PageCall):
    """The argument of an action: the call, and the fields of its form."""

    form: Mapping[str, str]
    own: Caller | None = None
    """The caller who signed in, if it was one."""

    def field(self, name: str) -> str | None:
        """Return a field, None if it is absent or empty."""
        return self.form.get(name) or None

    async def acting(self, job_id: str) -> Caller:
        """Return the caller under whom a job is changed: who signed in, else the job's own.

        Raises ConveyorError(not_found).
        """
        return self.own or await self.service.lifecycle.owner(job_id)


Act = Callable[[ActionCall, str], Awaitable[str | None]]
"""Changes a job; returns the page that follows, if it is not the usual one."""


async def stop(call: ActionCall, job_id: str) -> None:
    """Stop the latest run."""
    caller = await call.acting(job_id)
    await call.service.lifecycle.stop(caller.caller_id, job_id)


async def pause(call: ActionCall, job_id: str, *, paused: bool = True) -> None:
    """Pause the latest run, or let it go on."""
    caller = await call.acting(job_id)
    await call.service.lifecycle.pause(caller.caller_id, job_id, paused=paused)


async def rerun(call: ActionCall, job_id: str) -> None:
    """Run the job again: all of it, or the tasks of a state or of failure groups."""
    choice = parse_choice(call.field("status"), call.field("group"))
    caller = await call.acting(job_id)
    await call.service.reruns.rerun(caller, job_id, choice=choice, keyed=None)


async def rerun_failed(call: ActionCall, job_id: str) -> None:
    """Run the failed tasks again."""
    caller = await call.acting(job_id)
    await call.service.reruns.rerun(caller, job_id, choice=parse_choice("failed", None), keyed=None)


async def delete(call: ActionCall, job_id: str) -> None:
    """Delete the job."""
    caller = await call.acting(job_id)
    await call.service.lifecycle.delete_job(caller.caller_id, job_id)


async def delete_run(call: ActionCall, job_id: str) -> None:
    """Delete a run."""
    caller = await call.acting(job_id)
    await call.service.lifecycle.delete_run(caller.caller_id, job_id, call.named_run_id)


async def export(call: ActionCall, job_id: str) -> str:
    """Start an export of a run."""
    word = call.field("format") or ExportFormat.ZIP.value
    if word not in list(ExportFormat):
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"format: {word} is none")
    caller = await call.acting(job_id)
    run_id = call.named_run_id
    started = await call.service.exports.start(
        caller.caller_id, job_id, run_id, export_format=ExportFormat(word)
    )
    return EXPORT.format(job_id=job_id, run_id=run_id, export_id=started.export_id)


async def set_schedule(call: ActionCall, job_id: str, *, state: str) -> None:
    """Pause the schedule, or let it go on."""
    caller = await call.acting(job_id)
    await call.service.schedules.set_state(
        caller, job_id, b'{"schedule_state":"%b"}' % state.encode()
    )


async def replay(call: ActionCall, job_id: str) -> None:
    """Send an event of the job again."""
    caller = await call.acting(job_id)
    await call.service.replays.replay(caller.caller_id, call.delivery_id)


_JOB = f"{ROOT}/jobs/{{job_id}}"
_DELIVERY = f"{_JOB}/deliveries/{{delivery_id}}"
ACTIONS: dict[str, tuple[Act, str]] = {
    f"{_JOB}/stop": (stop, _JOB),
    f"{_JOB}/pause": (pause, _JOB),
    f"{_JOB}/resume": (partial(pause, paused=False), _JOB),
    f"{_JOB}/rerun": (rerun, _JOB),
    f"{_JOB}/delete": (delete, f"{ROOT}/jobs"),
    f"{_JOB}/runs/{{run_id}}/delete": (delete_run, _JOB),
    f"{_JOB}/runs/{{run_id}}/exports": (export, _JOB),
    f"{_JOB}/schedule/pause": (partial(set_schedule, state=PAUSED), f"{_JOB}/schedule"),
    f"{_JOB}/schedule/resume": (partial(set_schedule, state=ACTIVE), f"{_JOB}/schedule"),
    f"{_DELIVERY}/replay": (replay, _DELIVERY),
}
"""Every action on one job by its path, and the page that follows."""

LetterAct = Callable[[ActionCall, str], Awaitable[None]]
"""Moves a dead letter."""


async def redrive_letter(call: ActionCall, letter_id: str) -> None:
    """Send a dead letter back."""
    await call.service.letters.redrive(letter_id)


async def drop_letter(call: ActionCall, letter_id: str) -> None:
    """Remove a dead letter."""
    await call.service.letters.drop(letter_id)


LETTER_ACTIONS: dict[str, LetterAct] = {
    f"{LETTERS}/{{letter_id}}/redrive": redrive_letter,
    f"{LETTERS}/{{letter_id}}/drop": drop_letter,
}
"""Every action on one dead letter by its path; the list of letters follows."""

BULK = f"{ROOT}/bulk"
_SEPARATORS = re.compile(r"[\s,.'’_]")
"""Marks between the digits of a number, as people and pages write it."""
BULK_ACTIONS: dict[str, tuple[Act, str, str]] = {
    "stop": (stop, "Stop", "/stop"),
    "pause": (pause, "Pause", "/pause"),
    "resume": (partial(pause, paused=False), "Resume", "/resume"),
    "rerun": (rerun, "Run again", "/rerun"),
    "rerun-failed": (rerun_failed, "Run the failed tasks again of", "/rerun?status=failed"),
    "delete": (delete, "Delete", ""),
}
"""Actions on all jobs that a filter takes, each with its words and its call of the API."""


class RefusedJobs(Struct, frozen=True):
    """Jobs of a bulk action that were left as they are, for one reason."""

    code: str
    count: int


class BulkPage(Struct, frozen=True, kw_only=True):
    """A bulk action: the number of jobs that it is about, or what came of it.

    `next_cursor` leads to those behind them, of which `left` match, or more where `has_more_left`.
    """

    action: str
    words: str
    count: int
    next_cursor: str | UnsetType = UNSET
    left: int = 0
    has_more_left: bool = False
    is_wrong: bool = False
    is_number: bool = True
    is_done: bool = False
    done: int = 0
    refused: Sequence[RefusedJobs] = ()


class Actions:
    """Serves the actions of a dashboard."""

    def __init__(self, service: Service, dashboard: Dashboard, sessions: Sessions) -> None:
        self._service = service
        self._dashboard = dashboard
        self._sessions = sessions

    def routes(self) -> list[Route]:
        """Return the routes of all actions."""
        routes = [
            Route(path, self._endpoint(path, act, follows), methods=["POST"])
            for path, (act, follows) in ACTIONS.items()
        ]
        routes += [
            Route(path, self._letter_endpoint(path, act), methods=["POST"])
            for path, act in LETTER_ACTIONS.items()
        ]
        routes.append(Route(f"{BULK}.json", self.count, methods=["GET"]))
        routes.append(Route(BULK, self.confirm, methods=["GET"]))
        routes.append(Route(BULK, self.bulk, methods=["POST"]))
        routes.append(Route(SIGN_IN, self.ask, methods=["GET"]))
        routes.append(Route(SIGN_IN, self.sign_in, methods=["POST"]))
        routes.append(Route(SIGN_OUT, self.sign_out, methods=["POST"]))
        return routes

    def _endpoint(
        self, path: str, act: Act, follows: str
    ) -> Callable[[Request], Awaitable[Response]]:
        name = path.removeprefix(f"{_JOB}/")

        async def work(call: ActionCall) -> Response:
            address = await _logged(call, name, act, call.job_id)
            address = address or follows.format(**call.request.path_params)
            return RedirectResponse(address, status_code=303)

        async def answer(request: Request) -> Response:
            return await self._answer(request, work)

        return answer

    def _letter_endpoint(
        self, path: str, act: LetterAct
    ) -> Callable[[Request], Awaitable[Response]]:
        name = path.removeprefix(f"{LETTERS}/{{letter_id}}/")

        async def work(call: ActionCall) -> Response:
            call.check_sees_letters()
            letter_id: str = call.request.path_params["letter_id"]
            with _audited(call, name, letter_id=letter_id):
                await act(call, letter_id)
            return RedirectResponse(LETTERS, status_code=303)

        async def answer(request: Request) -> Response:
            return await self._answer(request, work)

        return answer

    async def _answer(
        self, request: Request, work: Callable[[ActionCall], Awaitable[Response]]
    ) -> Response:
        """Do what a form asks for, if its viewer may."""
        viewer = None
        try:
            viewer = await self._sessions.identify(request)
            if viewer is None:
                return self._dashboard.stranger(request)
            if not viewer.acts:
                raise ConveyorError(
                    ErrorCode.PERMISSION_DENIED, "with this key jobs are looked at, not changed"
                )
            form = await read_form(request)
            self._sessions.check_token(request, form.get("token", ""))
            own = self._sessions.caller(request, viewer)
            return await work(ActionCall(request, self._service, viewer, form, own))
        except ConveyorError as error:
            return self._dashboard.problem(request, error, viewer)

    # -- sign-in --

    async def ask(self, request: Request) -> Response:
        """Ask for an API key."""
        if await self._sessions.identify(request) is not None:
            return RedirectResponse(ROOT, status_code=303)
        return self._dashboard.sign_in_page(request, SignInPage(ROOT), status=200)

    async def sign_in(self, request: Request) -> Response:
        """Sign a person in by the API key in the form."""
        try:
            form = await read_form(request)
            page = SignInPage(form.get("next", ROOT), is_refused=True)
            if not self._sessions.keeps_cookies(request):
                return self._dashboard.sign_in_page(request, page, status=403)
            answer = self._sessions.sign_in(form.get("key", ""), page.next_page)
        except ConveyorError as error:
            return self._dashboard.problem(request, error)
        return answer or self._dashboard.sign_in_page(request, page)

    async def sign_out(self, request: Request) -> Response:
        """Sign the person out."""
        try:
            form = await read_form(request)
            self._sessions.check_token(request, form.get("token", ""))
        except ConveyorError as error:
            return self._dashboard.problem(request, error)
        return self._sessions.sign_out()

    # -- all that match --

    async def confirm(self, request: Request) -> Response:
        """Ask how many jobs a bulk action is about."""
        viewer = None
        try:
            viewer = await self._sessions.identify(request)
            if viewer is None:
                return self._dashboard.stranger(request)
            call = PageCall(request, self._service, viewer)
            action = _bulk_action(call)
            found = await _matching(call, call.cursor)
        except ConveyorError as error:
            return self._dashboard.problem(request, error, viewer)
        page = _bulk_page(action, found)
        return self._dashboard.page(request, _bulk_screen(call, page), viewer)

    async def count(self, request: Request) -> Response:
        """Answer with the number of jobs that a bulk action is about."""
        viewer = await self._sessions.identify(request)
        if viewer is None:
            return self._dashboard.stranger(request, as_json=True)
        call = PageCall(request, self._service, viewer)
        found = await _matching(call, call.cursor)
        return json_response(_bulk_page(_bulk_action(call), found))

    async def bulk(self, request: Request) -> Response:
        """Do an action on every job that a filter takes, if their number is the one given."""
        return await self._answer(request, self._bulk)

    async def _bulk(self, call: ActionCall) -> Response:
        action = _bulk_action(call)
        act, _, _ = BULK_ACTIONS[action]
        found = await _matching(call, call.cursor)
        page = _bulk_page(action, found)
        typed = _SEPARATORS.sub("", call.form.get("count", ""))
        is_number = typed.isdecimal() and typed.isascii()
        if not is_number or typed.lstrip("0") != str(page.count or ""):
            page = structs.replace(page, is_wrong=True, is_number=is_number)
            screen = _bulk_screen(call, page, status=409)
            return self._dashboard.page(call.request, screen, call.viewer)
        refused: Counter[str] = Counter()
        for line in found.jobs:
            try:
                await _logged(call, action, act, line.job_id)
            except ConveyorError as error:
                refused[error.code.value] += 1
        if page.next_cursor:
            behind = await _matching(call, page.next_cursor)
            page = structs.replace(
                page, left=len(behind.jobs), has_more_left=bool(behind.next_cursor)
            )
        page = structs.replace(
            page,
            is_done=True,
            done=page.count - refused.total(),
            refused=[RefusedJobs(*one) for one in refused.most_common()],
        )
        return self._dashboard.page(call.request, _bulk_screen(call, page), call.viewer)


def _bulk_action(call: PageCall) -> str:
    action = call.word("action", tuple(BULK_ACTIONS))
    if action is None:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"action: must be one of {', '.join(BULK_ACTIONS)}"
        )
    return action


async def _matching(call: PageCall, after: str | None) -> JobsFound:
    """Return the jobs that the filter in the address takes, MOST_LOOKED at most, behind a place in
    the list of jobs."""
    return await call.service.overviews.jobs(
        call.caller, job_search(call), cursor=after, limit=MOST_LOOKED
    )


def _bulk_page(action: str, found: JobsFound) -> BulkPage:
    return BulkPage(
        action=action,
        words=BULK_ACTIONS[action][1],
        count=len(found.jobs),
        next_cursor=found.next_cursor,
    )


def _bulk_screen(call: PageCall, page: BulkPage, *, status: int = 200) -> Screen:
    wanted, (_, _, suffix) = job_search(call), BULK_ACTIONS[page.action]
    filters = {
        "state": wanted.state,
        "type": wanted.job_type,
        "name": wanted.name,
        "external_id": wanted.external_id,
    }
    values = {
        "wanted": {name: value for name, value in filters.items() if value},
        "back": with_query(f"{ROOT}/jobs", **filters),
        "again": with_query(BULK, action=page.action, cursor=call.cursor, **filters),
        "onward": with_query(BULK, action=page.action, cursor=page.next_cursor or None, **filters),
        "api_call": api_line(
            "POST" if suffix else "DELETE",
            f"/v1/jobs/JOB_ID{suffix}",
            call.service.options.public_origin,
        ),
    }
    title = f"{page.words} jobs"
    return Screen(
        template="bulk.html", title=title, section="Jobs", page=page, status=status, values=values
    )


async def _logged(call: ActionCall, name: str, act: Act, job_id: str) -> str | None:
    """Change a job, and return the page that follows, as the action does."""
    with _audited(call, name, job_id=job_id):
        return await act(call, job_id)


@contextmanager
def _audited(
    call: ActionCall, name: str, *, job_id: str = "", letter_id: str = ""
) -> Iterator[None]:
    """If it is an operator who acts, write a line about the action in the context, done or
    refused."""
    outcome = "done"
    try:
        yield
    except ConveyorError as error:
        outcome = error.code.value
        raise
    finally:
        if call.viewer.operator is not None:
            what = "dead letter" if letter_id else "job"
            about = {
                "operator": call.viewer.operator,
                "action": name,
                "job_id": job_id,
                "letter_id": letter_id,
                "outcome": outcome,
                "request_id": request_id_of(call.request.scope),
            }
            about = {field: value for field, value in about.items() if value}
            _log.warning("an operator acted on a %s", what, extra=about)


async def read_form(request: Request) -> dict[str, str]:
    """Read the fields of a form; of a name that comes twice, the last.

    Raises ConveyorError: unsupported_media_type; payload_too_large; invalid_argument; ClientGone.
    """
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise ConveyorError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE, "send a form as application/x-www-form-urlencoded"
        )
    announced = request.headers.get("Content-Length", "0")
    if not announced.isdecimal() or int(announced[:20]) > MOST_FORM:
        raise _too_large()
    content = (await read_body(request)).joined()
    if len(content) > MOST_FORM:
        raise _too_large()
    try:
        return dict(parse_qsl(content.decode("ascii"), max_num_fields=100, errors="strict"))
    except ValueError:
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "the form is damaged") from None


def _too_large() -> ConveyorError:
    return ConveyorError(ErrorCode.PAYLOAD_TOO_LARGE, f"a form holds at most {MOST_FORM:,} bytes")
