"""A manual of many pages, many with odd names, and the servers that serve it."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

from conveyor.demo import site
from tests.acceptance.support_site import in_background

MARKS = "^[]!~'(),;=@&+$%·ö⊠⧢∏⋂𝔠日"
"""Characters of file names that links have escaped, or as they stand."""
ODD = 200
"""Pages with such a character in their names, or some."""
_FOLDERS = 60
_MEDIAN_PARAGRAPHS, _SIGMA, _MOST_PARAGRAPHS = 12.0, 1.1, 2_000
_START_SECONDS = 60.0
_NGINX = """
daemon off;
{user}
pid {directory}/nginx.pid;
error_log {directory}/nginx.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  types {{ text/html html; }}
  charset utf-8;
  gzip on;
  gzip_min_length 1;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  server {{
    listen 127.0.0.1:{port};
    root "{root}";
  }}
}}
"""


def write_manual(root: Path, count: int) -> list[Path]:
    """Write a manual of so many pages, always the same; return its pages below `root`, in order.

    They are of the words of the demonstration's pages, some kilobytes long and a few a megabyte.
    """
    by_chance = random.Random(count)
    paragraphs = _paragraphs()
    pages = [Path(f"folder_{number % _FOLDERS}", _name(number)) for number in range(count)]
    for page in pages:
        length = by_chance.lognormvariate(0, _SIGMA) * _MEDIAN_PARAGRAPHS
        text = by_chance.choices(paragraphs, k=1 + min(int(length), _MOST_PARAGRAPHS))
        (root / page).parent.mkdir(parents=True, exist_ok=True)
        title = f"<!doctype html><meta charset=utf-8><title>{page}</title>"
        (root / page).write_text("\n".join([title, *text]), encoding="utf-8")
    return sorted(pages)


def _name(number: int) -> str:
    """Return the name of a page: of the first ODD ones, one with a mark or with several."""
    if number >= ODD:
        return f"page-{number}.html"
    marks = MARKS[number % len(MARKS)]
    for step in range(number // len(MARKS)):
        marks += MARKS[(number * 7 + step) % len(MARKS)]
    return f"__Odd_{marks}_{number}.html"


def _paragraphs() -> list[str]:
    """Return the paragraphs of the demonstration's pages that are UTF-8."""
    found: list[str] = []
    for name, content in site.pages().items():
        if name.endswith(".html") and "utf-8" in site.content_type(name):
            found += re.findall(r"<p>.+?</p>", content.decode(), re.DOTALL)
    return found


def is_odd(page: Path) -> bool:
    """Return whether a name needs more than letters, digits and the few marks that no URL
    escapes."""
    return quote(str(page)) != str(page)


def spellings(page: Path) -> list[str]:
    """The ways in which links to a page are written: escaped, and as it stands."""
    plain = str(page).replace("%", "%25")
    return list(dict.fromkeys([quote(str(page)), plain]))


@contextmanager
def standard_library(root: Path) -> Iterator[str]:
    """The directory served by `http.server`: the origin."""
    handler = functools.partial(_Quiet, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, in_background(server):
        yield f"http://127.0.0.1:{server.server_port}"


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


def find_nginx() -> str | None:
    """Return the path of nginx, if it is installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def nginx(root: Path, directory: Path) -> Iterator[str]:
    """The directory served by nginx, compressed on the way: the origin."""
    program = find_nginx()
    assert program is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Started by root, it would drop to a user who cannot read a private directory.
    user = "user root;" if os.geteuid() == 0 else ""
    config = directory / "nginx.conf"
    config.write_text(_NGINX.format(directory=directory, root=root, port=port, user=user))
    child = subprocess.Popen([program, "-p", directory, "-c", config], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, child)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait()


def _wait_for(port: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError("nginx did not start")
