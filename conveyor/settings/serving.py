"""Settings of where a process listens, whom it calls and trusts, and what it logs."""

from __future__ import annotations

from conveyor.settings.row import DEVELOPMENT, EVERY_SERVER, SERVERS, WORKERS, Setting
from conveyor.settings.validators import (
    between,
    gateway,
    networks,
    not_empty,
    one_of,
    origin,
    proxy,
)

SERVING: tuple[Setting, ...] = (
    Setting("host", "address", "where to listen", used_by=SERVERS, production="0.0.0.0"),
    Setting("port", "port", "where to listen; 0: a free one", between(0, 65_535), used_by=SERVERS),
    Setting(
        "data_dir",
        "path",
        "directory of the database, the result bodies and the secret",
        not_empty,
        used_by=DEVELOPMENT,
    ),
    Setting(
        "gateway",
        "word or URL",
        "the scraper: `direct`, `fake`, or the http(s) URL of a scraping API",
        gateway,
        used_by=WORKERS,
    ),
    Setting(
        "gateway_proxy",
        "URL",
        "the proxy on the way to a scraping API, `http://[USER:PASSWORD@]HOST:PORT`; no proxy is "
        "ever taken from the environment's other variables, and `direct` uses none",
        proxy,
        used_by=WORKERS,
        secret=True,
    ),
    Setting(
        "http_engine",
        "word",
        "the HTTP client of the gateways: `wire`, or `aiohttp` (the extra of that name) until the "
        "next release",
        one_of("wire", "aiohttp"),
        used_by=WORKERS,
    ),
    Setting(
        "ragged_end",
        "word",
        "a body over TLS without length, chunks or coding whose connection ends without "
        "close_notify: `fail` the attempt, or `accept` it as whole",
        one_of("fail", "accept"),
        used_by=WORKERS,
    ),
    Setting(
        "ca_file",
        "path",
        "a PEM file of certificate authorities that the gateways trust beside the system's",
        used_by=WORKERS,
    ),
    Setting(
        "allow_private",
        "switch",
        "let the direct gateway fetch addresses that are not public",
        used_by=WORKERS,
    ),
    Setting(
        "public_url",
        "URL",
        "origin of signed links and of those in events, if not the bound address",
        origin,
    ),
    Setting(
        "webhook_private",
        "comma list",
        "receivers of events inside one's own network: host names, and networks such as "
        "`10.0.0.0/8`; in production never loopback, link-local addresses or those of metadata",
        networks,
    ),
    Setting(
        "webhook_ca_file",
        "path",
        "a PEM file of certificate authorities that receivers of events have, beside the system's",
    ),
    Setting(
        "allowed_hosts",
        "comma list",
        "further host names that requests may use",
        used_by=SERVERS,
    ),
    Setting(
        "dashboard",
        "switch",
        "serve pages to look at, under /dashboard",
        used_by=SERVERS,
        production=False,
    ),
    Setting(
        "operator_keys",
        "hashes or path",
        "who may see all callers on pages: as `CONVEYOR_API_KEYS`, without `any`; who has `acts` "
        "behind the hash may also change their jobs",
        used_by=SERVERS,
    ),
    Setting(
        "secret",
        "comma list",
        "root secret, then older ones; if empty, conveyor-dev makes one in the data directory",
        used_by=f"{EVERY_SERVER}, conveyor admin",
        secret=True,
    ),
    Setting(
        "log_level",
        "word",
        "least severe level to log: `debug`, `info`, `warning`, `error`",
        one_of("debug", "info", "warning", "error"),
    ),
    Setting(
        "log_format",
        "word",
        "form of a log line: `text` or `json`",
        one_of("text", "json"),
        production="json",
    ),
)
