"""The limits of hosts that a server has: of its settings, and of a file that is read again after it
has changed."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from conveyor.aio.log_output import NEWS
from conveyor.domain.hosts import BadHostRules, HostPolicies, HostRules, parse_host_patterns
from conveyor.engine.hosts import HostPaces, MessageTurns
from conveyor.engine.policy import Policy
from conveyor.engine.reserve import ReservePolicy
from conveyor.ports.clock import Clock
from conveyor.ports.pacing import Pacing
from conveyor.settings import InvalidSetting, Settings

MOST_BYTES = 4_000_000
"""Bytes of a file of patterns: several times those of as many patterns as it may hold."""
LOOK_EVERY = 1.0
"""Seconds between two looks at the file of patterns."""

_log = logging.getLogger("conveyor.hosts")


def host_policies(settings: Settings, clock: Clock) -> HostPolicies:
    """Make the policies of a server. Raises InvalidSetting for a file of patterns that cannot be
    used."""
    return HostPolicies(watched_rules(settings, clock))


def watched_rules(settings: Settings, clock: Clock) -> WatchedHostRules:
    """Make the rules of a server. Raises InvalidSetting for a file of patterns that cannot be
    used."""
    limit, rate = settings.host_limit, settings.host_rate
    try:
        return WatchedHostRules(clock, settings.hosts, limit=limit, rate=rate)
    except BadHostRules as error:
        raise InvalidSetting("CONVEYOR_HOSTS", f"{settings.hosts}: {error}") from None


def host_turns(
    policy: Policy, pacing: Pacing, policies: HostPolicies, clock: Clock
) -> MessageTurns | None:
    """Let a worker keep the limits of hosts; one that receives before it has its permits keeps
    none."""
    if not isinstance(policy, ReservePolicy):
        return None
    policy.hosts = HostPaces(pacing, policies, clock)
    return MessageTurns(policy.hosts, policy, clock)


class WatchedHostRules:
    """The limits of a server, with those of a file of patterns, which is read again after it has
    changed. A file that cannot be used leaves the rules as they are, and the log says why once.
    To look the rules up never fails.

    Raises BadHostRules for one that cannot be used from the start.
    """

    def __init__(self, clock: Clock, path: str, *, limit: int, rate: float) -> None:
        self._clock = clock
        self._path = Path(path) if path else None
        self._limit = limit
        self._rate = rate
        self._stamp = self._look()
        self._looked_at = clock.monotonic()
        self.rules = self._read()

    def __call__(self) -> HostRules:
        """Return the rules as they are now."""
        if self._path is None:
            return self.rules
        now = self._clock.monotonic()
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self.rules = self._read()
                except BadHostRules as error:
                    _log.warning(
                        "the file of hosts %s: %s; the rules before hold on",
                        self._path,
                        error,
                        extra=NEWS,
                    )
        return self.rules

    def _look(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self) -> HostRules:
        patterns = None
        if self._path is not None:
            patterns = parse_host_patterns(_text_of(self._path))
        return HostRules(limit=self._limit, rate=self._rate, patterns=patterns)


def _text_of(path: Path) -> str:
    """Read a regular file. Nothing is waited for: a pipe may have no writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BadHostRules("is no regular file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MOST_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadHostRules(f"cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise BadHostRules(f"has more than {MOST_BYTES:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise BadHostRules("is no text in UTF-8") from None
