"""The sweeper: a periodic look over the whole store for what is stuck, lost or past its time.

Whatever it does may be done twice, and by two workers at once: it sends messages again, and removes
what nobody needs.
"""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from conveyor.handlers.alone import alone
from conveyor.handlers.sweep_memory import Recently
from conveyor.handlers.sweep_quiet import QuietRuns
from conveyor.handlers.sweep_retention import Retention
from conveyor.ports.binding import Binding
from conveyor.ports.blobs import export_key, input_key
from conveyor.ports.clock import Clock
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, ExportMessage, IngestMessage

CLAIM_SHARE = 0.8
"""Share of the interval for which a claimed sweep keeps other workers from theirs: less than any
interval with its jitter, so that a worker never keeps itself."""
LEAST = 1.0
"""Seconds that each part of a sweep may take at least, whatever the others took of the claim."""
DELETE_PATIENCE = 4
"""Quiet periods that a tombstone may stand untouched before its delete message is sent again."""
PAGE = 100

_log = logging.getLogger("conveyor.handlers")


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that concern the sweeper; seconds, and days."""

    interval: float
    quiet_after: float
    row_retention_days: int


class Sweeper:
    """Looks after everything once a call; one worker of a fleet at a time."""

    def __init__(self, binding: Binding, clock: Clock, *, options: SweepOptions) -> None:
        self._binding = binding
        self._clock = clock
        self._options = options
        self._recently = Recently(clock, seconds=options.quiet_after)
        self._claimed_until = 0.0
        self._quiet_runs = QuietRuns(binding, clock, quiet_after=options.quiet_after)
        self._retention = Retention(binding, clock, row_days=options.row_retention_days)

    async def sweep(self) -> None:
        """One look. What fails is logged and left to the next one; the rest is done.

        What may take long ends with the claim: the next worker that sweeps, or this one, goes on.
        """
        now = self._clock.now()
        lasts = self._options.interval * CLAIM_SHARE
        self._claimed_until = self._clock.monotonic() + lasts
        lapses_at = now + round(lasts * 1_000)
        if not await self._binding.sweeping.claim_sweep(now=now, lapses_at=lapses_at):
            return
        await alone("sweeping unfinished writes", self._unfinished_writes)
        await alone("sweeping stuck ingestions", self._ingestions)
        await alone("sweeping unfinished exports", self._exports)
        await alone("sweeping quiet runs", partial(self._quiet_runs.look, until=self._until))
        await alone("sweeping unfinished deletions", self._deletions)
        await alone("sweeping expired inputs", partial(self._expired_inputs, until=self._until))
        await alone("sweeping expired exports", partial(self._expired_exports, until=self._until))
        await alone("sweeping expired results", partial(self._retention.look, until=self._until))

    @property
    def _until(self) -> float:
        """When a part that begins now is to end, by the monotonic clock."""
        return max(self._claimed_until, self._clock.monotonic() + LEAST)

    @property
    def _quiet_since(self) -> int:
        return self._clock.now() - round(self._options.quiet_after * 1_000)

    async def _unfinished_writes(self) -> None:
        if count := await self._binding.sweeping.tidy(now=self._clock.now()):
            _log.warning("what unfinished writes left behind was removed: %d things", count)

    async def _ingestions(self) -> None:
        stuck = await self._binding.ingestion.stuck_ingests(before=self._quiet_since)
        for job_id, run_id in stuck:
            if self._recently.first(f"ingest {run_id}"):
                await self._binding.queues.send(CONTROL_QUEUE, IngestMessage(job_id, run_id))

    async def _exports(self) -> None:
        """Whoever makes an export, or lets it wait for its turn, touches it."""
        exports = self._binding.exports
        for export in await exports.unfinished_exports(before=self._quiet_since):
            await exports.touch_export(export.export_id, now=self._clock.now())
            message = ExportMessage(export.job_id, export.run_id, export.export_id)
            await self._binding.queues.send(CONTROL_QUEUE, message)

    async def _deletions(self) -> None:
        """Whoever scrubs a run touches its tombstone, however long it takes."""
        now = self._clock.now()
        before = now - round(DELETE_PATIENCE * self._options.quiet_after * 1_000)
        for job_id, run_id in await self._binding.runs.deleted_runs(before=before):
            # Touched first: one message of all workers, also where sending one fails.
            await self._binding.runs.touch_tombstone(run_id, now=now)
            await self._binding.queues.send(CONTROL_QUEUE, DeleteMessage(job_id, run_id))

    async def _expired_inputs(self, *, until: float) -> None:
        page = partial(self._binding.inputs.expired_inputs, now=self._clock.now(), limit=PAGE)
        while expired := await page():
            for input_id in expired:
                await self._binding.blobs.delete(input_key(input_id))
                await self._binding.inputs.drop_input(input_id)
                if self._clock.monotonic() >= until:
                    return

    async def _expired_exports(self, *, until: float) -> None:
        page = partial(self._binding.exports.expired_exports, now=self._clock.now(), limit=PAGE)
        while expired := await page():
            for export in expired:
                key = export_key(export.job_id, export.run_id, export.export_id)
                await self._binding.blobs.delete(key)
                await self._binding.exports.drop_export(export.export_id)
                if self._clock.monotonic() >= until:
                    return
