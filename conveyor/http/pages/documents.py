"""Pages for people with a browser: `/` says where things are, `/docs` shows the OpenAPI document.

They are made of the document here. They hold no script, load nothing, and their policy allows
nothing but their own style. Whoever does not ask for HTML is told where things are in a few lines
of plain text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from conveyor import __version__
from conveyor.http.openapi import document
from conveyor.http.pages.views import ROOT

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --link: #06c; }
@media (prefers-color-scheme: dark) { :root { --link: #7bf; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
a { color: var(--link); }
h1 { margin: 0 0 .5rem; } h2 { margin: 2.5rem 0 .75rem; } h3 { margin: 1.25rem 0 .25rem; }
h3 { font-size: 1rem; }
code, pre { font: .875em/1.5 ui-monospace, monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: .4rem; overflow-x: auto; padding: .8rem 1rem; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0; }
summary { cursor: pointer; display: flex; flex-wrap: wrap; gap: .2rem .8rem; padding: .5rem .8rem; }
summary b { font: 600 .875em/1.7 ui-monospace, monospace; min-width: 4.5rem; }
details > div { border-top: 1px solid var(--line); padding: .1rem .8rem .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { border-top: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; }
th, td { vertical-align: top; }
th { border: 0; font-size: .85em; }
td:first-child { white-space: nowrap; }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}

Page = Callable[[Request], Awaitable[Response]]


def page_routes(origin: str, *, has_metrics: bool, has_dashboard: bool) -> dict[str, Page]:
    """Map paths to pages; `origin` is the address that callers know. A browser at `/` is sent to
    the dashboard, where there is one."""
    start = _start(origin, has_metrics=has_metrics)
    lines = _lines(origin, has_dashboard=has_dashboard)

    async def root(request: Request) -> Response:
        if has_dashboard and _wants_html(request):
            return Response(status_code=303, headers={**_HEADERS, "Location": ROOT})
        return shown(request, lambda: start)

    async def docs(request: Request) -> Response:
        return shown(request, _docs)

    def shown(request: Request, page: Callable[[], str]) -> Response:
        if _wants_html(request):
            return Response(page(), headers=_HEADERS, media_type="text/html")
        return Response(lines, headers=_HEADERS, media_type="text/plain")

    return {"/": root, "/docs": docs}


def foreign_host_page(request: Request, host: str) -> Response | None:
    """Say to a browser at a page why a host is refused and where it is allowed; None elsewhere."""
    path = request.url.path
    is_page = path in ("/", "/docs", ROOT) or path.startswith(f"{ROOT}/")
    if not is_page or not _wants_html(request):
        return None
    page = _page(
        "Conveyor: another host",
        "<h1>This server does not know its name</h1>",
        f"<p>The browser asked for <code>{escape(host)}</code>. Requests for names that a server "
        "was not told are refused, so that no web page of others can reach it.</p>",
        "<p>If the name is right, start the server with it in "
        "<code>CONVEYOR_ALLOWED_HOSTS</code>: names or addresses without a port, with commas "
        "between them.</p>",
    )
    return Response(page, status_code=403, headers=_HEADERS, media_type="text/html")


def _wants_html(request: Request) -> bool:
    for accepted in ",".join(request.headers.getlist("Accept")).split(","):
        media_type, *parameters = (part.strip().lower() for part in accepted.split(";"))
        if media_type == "text/html":
            return not any(map(_is_zero, parameters))
    return False


def _is_zero(parameter: str) -> bool:
    """Tell whether a parameter of a media type is the weight 0, which means never."""
    name, _, value = parameter.partition("=")
    try:
        return name.strip() == "q" and float(value) == 0
    except ValueError:
        return False


def _page(title: str, *body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</html>"
    )


def _start(origin: str, *, has_metrics: bool) -> str:
    places = {
        "/docs": "the API: every operation, field and answer",
        "/openapi.json": "the same as an OpenAPI document, for programs",
        "/healthz": "whether the server is alive",
        "/readyz": "whether it is ready to work",
        **({"/metrics": "its metrics, in the text format of Prometheus"} if has_metrics else {}),
    }
    rows = [[f'<a href="{path}"><code>{path}</code></a>', what] for path, what in places.items()]
    address = f"{origin}/v1"
    submit = '{"tasks": [{"url": "https://example.com/"}]}'
    return _page(
        "Conveyor",
        f"<h1>Conveyor</h1>\n<p>Scrapes many URLs: submit a list, follow the run, read the "
        f"results. Version {escape(__version__)}.</p>",
        f"<p>The API is at <code>{escape(address)}</code>. It wants a key in the header "
        "<code>X-API-Key</code>.</p>",
        "<h2>Where things are</h2>",
        _table(["Path", "What it shows"], rows),
        "<h2>A first job</h2>",
        f"<pre>{escape(f'conveyor submit --server {origin} --watch https://example.com/')}</pre>",
        f"<pre>{escape(_curl(address, submit))}</pre>",
    )


def _lines(origin: str, *, has_dashboard: bool) -> str:
    """Say where things are to whoever has no browser."""
    places = {
        "the API, with a key in X-API-Key": f"{origin}/v1",
        "every operation of it, in a browser": f"{origin}/docs",
        "the same as an OpenAPI document": f"{origin}/openapi.json",
        **({"what runs and what failed, in a browser": f"{origin}{ROOT}"} if has_dashboard else {}),
    }
    width = max(map(len, places.values()))
    lines = (f"{address:<{width}}  {what}\n" for what, address in places.items())
    return f"Conveyor {__version__}: scrapes many URLs\n\n{''.join(lines)}"


def _curl(address: str, body: str) -> str:
    return (
        f"curl {address}/jobs -H 'X-API-Key: KEY' -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'"
    )


# -- the document --


@cache
def _docs() -> str:
    whole = document()
    components = whole["components"]
    operations = [
        _operation(method, path, described, components)
        for path, methods in whole["paths"].items()
        for method, described in methods.items()
    ]
    schemas = [_schema(name, schema) for name, schema in components["schemas"].items()]
    return _page(
        "Conveyor: the API",
        f"<h1>Conveyor: the API</h1>\n<p>{escape(whole['info']['summary'])} "
        f'Version {escape(__version__)}; <a href="/openapi.json">as an OpenAPI document</a>; '
        '<a href="/">back to the start</a>.</p>',
        "<h2>Operations</h2>",
        *operations,
        "<h2>Documents</h2>",
        *schemas,
    )


def _operation(
    method: str, path: str, described: dict[str, Any], components: dict[str, Any]
) -> str:
    parameters = [_resolved(one, components) for one in described["parameters"]]
    body = described.get("requestBody", {}).get("content", {})
    answers = [
        [f"<code>{escape(status)}</code>", *_answer(_resolved(answer, components))]
        for status, answer in described["responses"].items()
    ]
    key = "" if described.get("security") == [] else "<p>Wants a key.</p>"
    parts = [
        key,
        _section("Parameters", ["Name", "In", "Type", "Meaning"], map(_parameter, parameters)),
        _section("Body", ["Content-Type", "Document"], _contents(body)),
        _section("Answers", ["Status", "Meaning", "Document"], answers),
    ]
    return (
        f'<details id="{escape(described["operationId"])}"><summary><b>{method.upper()}</b>'
        f"<code>{escape(path)}</code><span>{escape(described['summary'])}</span></summary>"
        f"<div>{''.join(parts)}</div></details>"
    )


def _resolved(node: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    _, kind, name = node["$ref"].removeprefix("#/").split("/")
    found: dict[str, Any] = components[kind][name]
    return found


def _parameter(parameter: dict[str, Any]) -> list[str]:
    needed = "" if parameter.get("required") else " (optional)"
    return [
        f"<code>{escape(parameter['name'])}</code>",
        escape(parameter["in"]) + needed,
        _type(parameter["schema"]),
        escape(parameter.get("description", "")),
    ]


def _contents(content: dict[str, Any]) -> Iterator[list[str]]:
    for media_type, described in content.items():
        yield [f"<code>{escape(media_type)}</code>", _type(described.get("schema", {}))]


def _answer(answer: dict[str, Any]) -> list[str]:
    documents = [shown for _, shown in _contents(answer.get("content", {}))]
    return [escape(answer["description"]), " or ".join(documents)]


def _schema(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    fields = (
        [
            f"<code>{escape(field)}</code>" + ("" if field in needed else " (optional)"),
            _type(described),
            escape(described.get("description", "")),
        ]
        for field, described in schema.get("properties", {}).items()
    )
    text = f"<p>{escape(schema.get('description', ''))}</p>"
    inner = _section("", ["Field", "Type", "Meaning"], fields) or f"<p>{_type(schema)}</p>"
    return (
        f'<details open id="schema-{escape(name)}"><summary><b>{escape(name)}</b></summary>'
        f"<div>{text}{inner}</div></details>"
    )


def _type(schema: dict[str, Any]) -> str:
    """Describe the values that a schema takes, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[choice])))
    if "enum" in schema or "const" in schema:
        words = schema["enum"] if "enum" in schema else [schema["const"]]
        return " or ".join(
            f"<code>{escape(str(word))}</code>" for word in words if word is not None
        )
    kinds = schema.get("type", [])
    names = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    shown = " or ".join(names) or "anything"
    if "array" in names and "items" in schema:
        shown = f"array of {_type(schema['items'])}"
    limits = {"minimum": "from", "maximum": "to", "maxLength": "at most", "default": "default"}
    said = [f"{word} {escape(str(schema[key]))}" for key, word in limits.items() if key in schema]
    return ", ".join([shown, *said])


def _section(title: str, heads: list[str], rows: Any) -> str:
    """Return a table under a title, or nothing without rows."""
    found = list(rows)
    if not found:
        return ""
    return (f"<h3>{escape(title)}</h3>" if title else "") + _table(heads, found)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{lines}</table></div>'
