"""Real pages: the files of a documentation package, and the servers that they are served by."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import quote

from tests.acceptance.support_site import in_background

PACKAGE = "passagemath-macaulay2-doc"
"""Of the dev extra: the manual of Macaulay2, 11,859 pages, many with odd names."""

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


def manual() -> tuple[Path, list[Path]]:
    """The directory of the manual, and its pages below it, in order."""
    files = distribution(PACKAGE).files or []
    located = [Path(str(file.locate())) for file in files if file.suffix == ".html"]
    root = Path(os.path.commonpath(located))
    return root, sorted(file.relative_to(root) for file in located)


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
