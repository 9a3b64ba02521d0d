"""The pages under /dashboard: their paths, headers, previews of bodies, and errors in words.

Each page is a record that `service/overview.py` reads, shown by a template, and as JSON at the same
address with `.json` behind it. No script, style or request but our own can run: the headers say so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from anyio import to_thread
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from conveyor.domain.deliveries import DeliveryStatus
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import is_ulid
from conveyor.http.event_streams import event_stream
from conveyor.http.middleware import request_id_of
from conveyor.http.pages.bodies import (
    MOST_SHOWN,
    PAGES_OF_MARKUP,
    charset,
    fitting_lines,
    media_type,
    shown_text,
)
from conveyor.http.pages.viewer import Viewer, Viewers
from conveyor.http.pages.views import HERE, LETTERS, ROOT, STATIC, Screen, job_path, render
from conveyor.http.problems import PROBLEMS
from conveyor.http.request import PathIds, cursor, json_response, text
from conveyor.service.jobs import JOB_TYPES
from conveyor.service.overview import MOST_IMAGE, STATES, JobSearch
from conveyor.service.page_schemas import Preview
from conveyor.service.progress import MOST_NAMED
from conveyor.service.results import FILTERS
from conveyor.service.service import Service

_log = logging.getLogger("conveyor.http")

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; frame-src 'self'; frame-ancestors 'none'; "
        "base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
EVENT_HEADERS = {name: PAGE_HEADERS[name] for name in ("X-Content-Type-Options", "Referrer-Policy")}
PREVIEW_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": (
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    ),
}
IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"})
GROUPS_SHOWN = 30
"""Failure groups on one page: more would make it large."""
MOST_PARAMETER = 1_024
"""Characters of a parameter of a page, which stands on it again."""
MOST_ADDRESS = 4_096
"""Characters of an address that stands on its page again."""
_FILES = {
    "dashboard.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "dashboard.js": "text/javascript; charset=utf-8",
    "keys.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "times.js": "text/javascript; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageCall(PathIds):
    """The argument of a page. `caller` is the one whose jobs are shown, None means all."""

    viewer: Viewer

    @property
    def caller(self) -> str | None:
        """Return the caller whose jobs are shown."""
        return self.viewer.caller_id

    async def owner(self) -> str:
        """Return the caller under whom the job in the path is read. Raises
        ConveyorError(not_found)."""
        return await self.service.overviews.owner(self.caller, self.job_id)

    def check_sees_letters(self) -> None:
        """Raise ConveyorError(not_found), as for an address that is no page, unless the viewer is
        an operator. A server without dead letters says so to whoever sees all callers."""
        viewer, letters = self.viewer, self.service.letters
        is_open = viewer.caller_id is None and not letters.has_queue
        if viewer.operator is None and not is_open:
            raise ConveyorError(ErrorCode.NOT_FOUND, "there is no such page")

    def word(self, name: str, words: tuple[str, ...]) -> str | None:
        """Return a parameter that must be one of the words, None if it is absent or empty."""
        value = self.text(name)
        if value is not None and value not in words:
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: must be one of {', '.join(words)}"
            )
        return value

    def number(self, name: str) -> int:
        """Return a parameter that must be a whole number, 0 if it is absent or empty."""
        value = self.text(name) or "0"
        if not value.isdecimal() or len(value) > 6:
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{name}: must be a whole number")
        return int(value)

    def text(self, name: str, *, most: int = MOST_PARAMETER) -> str | None:
        """Return a parameter of at most `most` characters, None if it is absent or empty."""
        value = text(self.request.query_params, name) or None
        if value is not None and len(value) > most:
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: more than {most:,} characters"
            )
        return value

    @property
    def cursor(self) -> str | None:
        """Return the place in a list where the page goes on."""
        return cursor(self.request.query_params)


Show = Callable[[PageCall], Awaitable[Screen]]


async def show_overview(call: PageCall) -> Screen:
    """Show what works and what is wrong."""
    page = await call.service.overviews.overview(call.caller)
    return Screen(template="overview.html", title="Overview", section="Overview", page=page)


def job_search(call: PageCall) -> JobSearch:
    """Read the filter of jobs in an address."""
    return JobSearch(
        state=call.word("state", STATES),
        job_type=call.word("type", JOB_TYPES),
        name=call.text("name"),
        external_id=call.text("external_id"),
    )


async def show_jobs(call: PageCall) -> Screen:
    """Show a list of jobs."""
    wanted = job_search(call)
    page = await call.service.overviews.jobs(call.caller, wanted, cursor=call.cursor)
    return Screen(
        template="jobs.html",
        title="Jobs",
        section="Jobs",
        page=page,
        values={"wanted": wanted, "states": STATES, "types": JOB_TYPES, "is_further": call.cursor},
    )


async def show_run(call: PageCall) -> Screen:
    """Show a run, or the latest run of a job; of a job without one, its schedule or what else there
    is."""
    owner = await call.owner()
    try:
        page = await call.service.overviews.run(owner, call.job_id, call.run_id)
    except ConveyorError as error:
        if error.code is not ErrorCode.NOT_FOUND or call.run_id is not None:
            raise
        found = await call.service.overviews.job(owner, call.job_id)
        if found.job.type == "scheduled":
            return await show_schedule(call)
        title = found.job.name or f"Job {found.job.job_id}"
        return Screen(template="job.html", title=title, section="Jobs", page=found)
    title = f"{page.job.name or 'Job ' + page.job.job_id}, run {page.run.run_sequence}"
    values = {"groups_from": call.number("groups_from"), "groups_shown": GROUPS_SHOWN}
    return Screen(template="run.html", title=title, section="Jobs", page=page, values=values)


async def show_results(call: PageCall) -> Screen:
    """Show rows of a run."""
    page = await call.service.overviews.results(
        await call.owner(),
        call.job_id,
        call.named_run_id,
        status=call.word("status", tuple(FILTERS)) or "all",
        group=call.text("group", most=MOST_ADDRESS),
        cursor=call.cursor,
    )
    title = f"Results of {page.job.name or 'job ' + page.job.job_id}"
    values = {"statuses": FILTERS, "is_further": call.cursor}
    return Screen(template="results.html", title=title, section="Jobs", page=page, values=values)


async def show_task(call: PageCall) -> Screen:
    """Show a task with its attempts."""
    page = await call.service.overviews.task(
        await call.owner(), call.job_id, call.named_run_id, call.task_id
    )
    kind = media_type(page.content_type or "")
    is_image = kind in IMAGES and 0 < (page.size or 0) <= MOST_IMAGE
    return Screen(
        template="task.html",
        title=f"Task {page.task_id}",
        section="Jobs",
        page=page,
        values={"is_image": is_image, "is_markup": kind in PAGES_OF_MARKUP},
    )


async def show_export(call: PageCall) -> Screen:
    """Show how far an export is."""
    page = await call.service.exports.get(
        await call.owner(), call.job_id, call.named_run_id, call.request.path_params["export_id"]
    )
    values = {"job_id": call.job_id, "run_id": call.named_run_id}
    return Screen(template="export.html", title="Export", section="Jobs", page=page, values=values)


async def show_workers(call: PageCall) -> Screen:
    """Show the workers."""
    page = await call.service.overviews.workers(call.caller)
    return Screen(template="workers.html", title="Workers", section="Workers", page=page)


async def show_deliveries(call: PageCall) -> Screen:
    """Show the events that went to receivers."""
    words = tuple(status.value for status in DeliveryStatus)
    status = call.word("status", words)
    page = await call.service.overviews.deliveries(
        call.caller,
        call.text("job"),
        status=None if status is None else DeliveryStatus(status),
        cursor=call.cursor,
    )
    return Screen(
        template="webhooks.html",
        title="Webhooks",
        section="Webhooks",
        page=page,
        values={
            "words_of_status": words,
            "is_everybody": call.caller is None,
            "is_further": call.cursor,
        },
    )


async def show_delivery(call: PageCall) -> Screen:
    """Show an event with its attempts."""
    page = await call.service.overviews.delivery(await call.owner(), call.job_id, call.delivery_id)
    title = f"Event {page.delivery_id}"
    return Screen(template="delivery.html", title=title, section="Webhooks", page=page)


async def show_schedules(call: PageCall) -> Screen:
    """Show the scheduled jobs."""
    page = await call.service.overviews.schedules(call.caller, cursor=call.cursor)
    return Screen(template="schedules.html", title="Schedules", section="Schedules", page=page)


async def show_schedule(call: PageCall) -> Screen:
    """Show the schedule of a job."""
    page = await call.service.overviews.schedule(
        await call.owner(), call.job_id, cursor=call.cursor
    )
    title = f"Schedule of {page.job.name or 'job ' + page.job.job_id}"
    return Screen(template="schedule.html", title=title, section="Schedules", page=page)


async def show_letters(call: PageCall) -> Screen:
    """Show the dead letters to an operator."""
    call.check_sees_letters()
    page = await call.service.letters.page(call.cursor)
    return Screen(
        template="dead_letters.html",
        title="Dead letters",
        section="Dead letters",
        page=page,
        values={"is_further": call.cursor},
    )


_RUN = f"{ROOT}/jobs/{{job_id}}/runs/{{run_id}}"
_TASK = f"{_RUN}/tasks/{{task_id}}"
PREVIEW = f"{_TASK}/preview"
EXPORT = f"{_RUN}/exports/{{export_id}}"
EVENTS = f"{ROOT}/events"
PAGES: dict[str, Show] = {
    ROOT: show_overview,
    f"{ROOT}/jobs": show_jobs,
    f"{ROOT}/jobs/{{job_id}}": show_run,
    f"{ROOT}/jobs/{{job_id}}/schedule": show_schedule,
    f"{ROOT}/jobs/{{job_id}}/deliveries/{{delivery_id}}": show_delivery,
    _RUN: show_run,
    f"{_RUN}/results": show_results,
    _TASK: show_task,
    EXPORT: show_export,
    f"{ROOT}/workers": show_workers,
    f"{ROOT}/webhooks": show_deliveries,
    f"{ROOT}/schedules": show_schedules,
    LETTERS: show_letters,
}
"""Every page by its path. Each is there as JSON too, with `.json` behind the path."""


class ProblemPage(Struct, frozen=True):
    """An error in words: as the API tells it, with a way back."""

    status: int
    heading: str
    detail: str
    back: str
    request_id: str


class SignInPage(Struct, frozen=True):
    """The page where one signs in: the page to go on to, and whether a key was not known."""

    next_page: str
    is_refused: bool = False


class Dashboard:
    """Serves the pages of one service to the viewers that `viewers` names."""

    def __init__(self, service: Service, viewers: Viewers) -> None:
        self._service = service
        self._viewers = viewers
        self._origin = service.options.public_origin
        self._files = {name: (HERE / "static" / name).read_bytes() for name in _FILES}

    def routes(self) -> list[Route]:
        """Return the routes of all pages, their JSON, the previews and the files."""
        routes = [Route(f"{STATIC}/{{name}}", self.file, methods=["GET"])]
        routes.append(Route(PREVIEW, self.preview, methods=["GET"]))
        routes.append(Route(EVENTS, self.events, methods=["GET"]))
        for path, show in PAGES.items():
            routes.append(Route(f"{path}.json", self._endpoint(show, True), methods=["GET"]))
            routes.append(Route(path, self._endpoint(show, False), methods=["GET"]))
        routes.append(Route(f"{ROOT}/{{rest:path}}", self.unknown, methods=["GET"]))
        return routes

    def _endpoint(self, show: Show, as_json: bool) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            viewer = None
            try:
                viewer = await self._viewers.identify(request)
                if viewer is None:
                    return self.stranger(request, as_json=as_json)
                screen = await show(PageCall(request, self._service, viewer))
            except ConveyorError as error:
                if as_json:
                    raise
                return self.problem(request, error, viewer)
            return json_response(screen.page) if as_json else self.page(request, screen, viewer)

        return answer

    def page(self, request: Request, screen: Screen, viewer: Viewer | None) -> Response:
        """Answer with a screen."""
        html = render(
            screen,
            viewer=viewer,
            path=request.url.path,
            query=request.url.query[:MOST_ADDRESS],
            origin=self._origin,
            token="" if viewer is None else self._viewers.token(request),
        )
        content = html.encode("utf-8", "replace")
        return Response(
            content, status_code=screen.status, headers=PAGE_HEADERS, media_type="text/html"
        )

    def problem(
        self, request: Request, error: ConveyorError, viewer: Viewer | None = None
    ) -> Response:
        """Answer with an error in words, under the API's status."""
        status, heading = PROBLEMS[error.code]
        request_id = request_id_of(request.scope)
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL):
            _log.warning(
                "a request could not be served",
                extra={"request_id": request_id, "error": str(error)},
            )
        page = ProblemPage(status, heading, error.detail, _way_back(request), request_id)
        screen = Screen(
            template="problem.html", title=heading, section="", page=page, status=status
        )
        answer = self.page(request, screen, viewer)
        if error.retry_after is not None:
            answer.headers["Retry-After"] = str(error.retry_after)
        return answer

    def stranger(self, request: Request, *, as_json: bool = False) -> Response:
        """Answer somebody who has to sign in first, with the page for it."""
        if as_json:
            raise ConveyorError(ErrorCode.UNAUTHENTICATED, "sign in to see this page")
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        is_kept = request.method == "GET" and len(address) <= MOST_ADDRESS
        return self.sign_in_page(request, SignInPage(address if is_kept else ROOT))

    def sign_in_page(self, request: Request, page: SignInPage, *, status: int = 401) -> Response:
        """Answer with the page where one signs in."""
        screen = Screen(
            template="sign_in.html",
            title="Sign in",
            section="",
            page=page,
            status=status,
            values={
                "is_secure": self._viewers.keeps_cookies(request),
                "accepts_any": self._viewers.accepts_any,
            },
        )
        return self.page(request, screen, None)

    async def unknown(self, request: Request) -> Response:
        """Answer an address that is no page; lead from one with a slash at its end to the page."""
        path = request.url.path
        as_json = path.endswith(".json")
        if path.endswith("/"):
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(path.rstrip("/") + query)
        viewer = await self._viewers.identify(request)
        if viewer is None:
            return self.stranger(request, as_json=as_json)
        error = ConveyorError(ErrorCode.NOT_FOUND, "there is no such page")
        if as_json:
            raise error
        return self.problem(request, error, viewer)

    async def file(self, request: Request) -> Response:
        """Answer with a file of ours."""
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(404)
        content = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"Cache-Control": "no-cache", "ETag": tag, "X-Content-Type-Options": "nosniff"}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_FILES[name])

    async def events(self, request: Request) -> Response:
        """Answer with the stream of the viewer's runs."""
        viewer = await self._viewers.identify(request)
        if viewer is None:
            return self.stranger(request, as_json=True)
        named = named_runs(request.query_params.getlist("run"))
        answer = await event_stream(
            request,
            self._service,
            viewer.caller_id,
            named=named,
            accepted=partial(self._viewers.still_sees, request, viewer),
        )
        answer.headers.update(EVENT_HEADERS)
        return answer

    async def preview(self, request: Request) -> Response:
        """Answer with the beginning of a body: as text, as the page that it is, or as an image."""
        viewer = await self._viewers.identify(request)
        if viewer is None:
            answer = self.stranger(request)
        else:
            try:
                return await self._preview(PageCall(request, self._service, viewer))
            except ConveyorError as error:
                answer = self.problem(request, error, viewer)
        answer.headers.update(PREVIEW_HEADERS)
        return answer

    async def _preview(self, call: PageCall) -> Response:
        form = call.word("as", ("text", "html", "image")) or "text"
        place = (await call.owner(), call.job_id, call.named_run_id, call.task_id)
        if form == "image":
            found = await call.service.overviews.preview(*place, most=MOST_IMAGE)
            kind = media_type(found.content_type)
            if kind not in IMAGES or found.is_cut:
                raise ConveyorError(ErrorCode.NOT_FOUND, "the body is no image of at most 1 MiB")
            return Response(found.data, headers=PREVIEW_HEADERS, media_type=kind)
        found = await call.service.overviews.preview(*place)
        if form == "html":
            # Without a character set in the header the browser looks for one in the page.
            label = charset(found.content_type)
            kind = f"text/html; charset={label}" if label else "text/html"
            headers = {**PREVIEW_HEADERS, "Content-Type": kind}
            return Response(found.data, headers=headers)
        page = await to_thread.run_sync(_preview_page, found)
        screen = Screen(template="preview.html", title="Body", section="", page=page)
        html = render(screen, viewer=call.viewer, path="", query="", origin="", token="")
        return Response(html, headers=PREVIEW_HEADERS, media_type="text/html")


def named_runs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Parse the runs that a stream of events is to tell of in any case, each a job's id, a slash
    and a run's. Raises ConveyorError(invalid_argument)."""
    runs = [(job_id, run_id) for job_id, _, run_id in (name.partition("/") for name in names)]
    if len(runs) > MOST_NAMED or not all(is_ulid(one) for run in runs for one in run):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"run: must be JOB/RUN, at most {MOST_NAMED} times"
        )
    return runs


class PreviewPage(Struct, frozen=True):
    """The beginning of a body as text, escaped; `is_cut` tells that the body goes on."""

    html: str
    size: int
    is_cut: bool


def _preview_page(found: Preview) -> PreviewPage:
    html, is_whole = fitting_lines(shown_text(found), MOST_SHOWN)
    return PreviewPage(html, found.size, found.is_cut or not is_whole)


def _way_back(request: Request) -> str:
    """Return the page to go back to from one that cannot be shown."""
    parts = request.url.path.split("/")
    if len(parts) > 4 and parts[2] == "jobs":
        return job_path(parts[3])
    return f"{ROOT}/jobs" if len(parts) > 3 and parts[2] == "jobs" else ROOT
