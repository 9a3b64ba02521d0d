"""Wire a recording between a development server and its gateway."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.gateway.recording import RecordingGateway, ReplayGateway
from conveyor.gateway.redaction import SecretNames, usual_names
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeRequest, Success
from conveyor.ports.idle import OpenWork
from conveyor.ports.recordings import Recorder, RecordingControl, RecordingState

MISSING = ("fail", "pass", "record")
WITHHELD = "not recorded: "
"""The beginning of the line of answers that were withheld."""
CUT_SHORT = "the recording could not be written to its end; a new one is of no use"
SAMPLES = 3
"""URLs of a recording that are offered to try."""
_SHOWN_HOSTS = 10

_log = logging.getLogger("conveyor.recording")


class RecordingChoice(msgspec.Struct, frozen=True):
    """The recording of a server: `record` is a new directory to write into, `replay` one to answer
    from, at most one of them; `missing` is the fate of a call that `replay` does not have.
    `names` returns what is redacted, asked before each call."""

    record: str = ""
    replay: str = ""
    missing: str = "fail"
    names: Callable[[], SecretNames] = usual_names

    def check(self) -> None:
        """Raise ConveyorError(invalid_argument) for what does not go together."""
        if self.record and self.replay:
            text = "a server records or replays; missing=record adds to what it replays"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        if self.missing not in MISSING:
            text = f"missing is one of {', '.join(MISSING)}"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)

    @property
    def calls_nobody(self) -> bool:
        """Tell whether no gateway is needed beside the recording."""
        return bool(self.replay) and self.missing == "fail"


NO_RECORDING = RecordingChoice()


class _Recording(msgspec.Struct, frozen=True):
    """The gateway of a choice: `recorder` writes calls down, `replay` has their answers, of which
    `samples` are some URLs."""

    choice: RecordingChoice
    gateway: Gateway
    recorder: RecordingGateway | None = None
    replay: ReplayGateway | None = None
    samples: tuple[str, ...] = ()

    def state(self) -> RecordingState:
        """Describe it."""
        choice, recorder = self.choice, self.recorder
        if recorder is None:
            return RecordingState(choice.record, choice.replay)
        answers, hosts = recorder.withheld
        return RecordingState(choice.record, choice.replay, answers, hosts, recorder.is_whole)


class SharedGateway(Gateway):
    """A gateway that is closed by whoever opened it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._gateway.scrape(request)

    async def aclose(self) -> None:
        """Nothing is to close."""


class _Recorders:
    """Opens recordings over one gateway, which is opened when it is first needed."""

    def __init__(
        self, open_gateway: Callable[[], Gateway], clock: Clock, work: OpenWork | None
    ) -> None:
        self._open_gateway = open_gateway
        self._clock = clock
        self._work = work
        self._gateway: Gateway | None = None

    async def open(self, choice: RecordingChoice) -> _Recording:
        """Open what answers the calls. Raises ConveyorError for a directory that cannot be recorded
        into, or answered from."""
        if not choice.record and not choice.replay:
            return _Recording(choice, self._plain())
        from conveyor.dev.recordings import open_recorder, open_recordings

        if choice.record:
            recorder = await open_recorder(Path(choice.record), self._work)
            recording = self._over(recorder, choice)
            return _Recording(choice, recording, recording)
        adds = choice.missing == "record"
        recordings = await open_recordings(Path(choice.replay), adds=adds, work=self._work)
        adding = self._over(recordings.recorder(), choice) if adds else None
        other = None if choice.calls_nobody else adding or self._plain()
        replay = ReplayGateway(recordings, other, choice.names)
        samples = tuple(await recordings.samples(SAMPLES))
        return _Recording(choice, replay, adding, replay, samples)

    def _over(self, recorder: Recorder, choice: RecordingChoice) -> RecordingGateway:
        return RecordingGateway(self._plain(), recorder, self._clock, choice.names, self._work)

    def _plain(self) -> Gateway:
        if self._gateway is None:
            self._gateway = self._open_gateway()
        is_shared = isinstance(self._gateway, SharedGateway)
        return self._gateway if is_shared else SharedGateway(self._gateway)

    async def aclose(self) -> None:
        """Close the gateway."""
        if self._gateway is not None:
            await self._gateway.aclose()


class RecordedGateway(Gateway, RecordingControl):
    """The gateway of a server behind its recording, which can be another while it runs."""

    def __init__(self, recorders: _Recorders, first: _Recording) -> None:
        self._recorders = recorders
        self._first = self._present = first
        self._calls = 0
        self._turn = anyio.Lock()

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        present = self._present
        if present is self._first:
            return present.gateway.scrape(request)
        return self._counted(present.gateway, request)

    @asynccontextmanager
    async def _counted(self, gateway: Gateway, request: ScrapeRequest) -> AsyncIterator[Success]:
        self._calls += 1
        try:
            async with gateway.scrape(request) as success:
                yield success
        finally:
            self._calls -= 1

    def recording(self) -> RecordingState:
        return self._present.state()

    async def record(self, directory: str) -> None:
        await self._change(RecordingChoice(record=directory, names=self._first.choice.names))

    async def replay(self, directory: str, *, missing: str = "fail") -> None:
        names = self._first.choice.names
        await self._change(RecordingChoice(replay=directory, missing=missing, names=names))

    async def _change(self, choice: RecordingChoice) -> None:
        choice.check()
        async with self._turn:
            self._check_idle()
            ended = self._present
            if _directory(choice) == _directory(ended.choice):
                await self._reopen(choice)
            else:
                # First: one that is refused leaves all as it was.
                opened = await self._recorders.open(choice)
                try:
                    await self._leave()
                except BaseException:
                    await opened.gateway.aclose()
                    raise
                self._present = opened
            if ended is not self._first:
                _tell(ended.state())

    async def _reopen(self, choice: RecordingChoice) -> None:
        """Change to another use of the same directory, which the present one has locked. A refused
        one leaves a replay as it was, but for the answers given."""
        ended = self._present
        await self._leave()
        try:
            self._present = await self._recorders.open(choice)
        except ConveyorError:
            if ended is not self._first and ended.replay is not None:
                self._present = await self._recorders.open(ended.choice)
            raise

    def _check_idle(self) -> None:
        if self._present is not self._first and self._calls:
            text = f"{self._calls} calls are under way: let the runs end first"
            raise ConveyorError(ErrorCode.CONFLICT, text)

    async def end_recording(self) -> RecordingState:
        async with self._turn:
            return await self._leave()

    async def _leave(self) -> RecordingState:
        self._check_idle()
        ended = self._present
        if ended is not self._first:
            self._present = self._first
            await ended.gateway.aclose()
        return ended.state()

    async def rewind(self) -> None:
        """Return to the recording of the start, and begin again with its first answers."""
        is_other = self._present is not self._first
        ended = await self.end_recording()
        if is_other:
            _tell(ended)
        if self._first.replay is not None:
            await self._first.replay.rewind()

    @property
    def samples(self) -> tuple[str, ...]:
        """Some URLs that the recording of the start has pages of."""
        return self._first.samples

    def farewell(self) -> Sequence[str]:
        """Return what to say about the recording of the start, once it is closed."""
        return _farewell(self._first.state())

    async def aclose(self) -> None:
        try:
            await self._present.gateway.aclose()
        finally:
            if self._present is not self._first:
                await self._first.gateway.aclose()
            await self._recorders.aclose()


async def open_recorded(
    choice: RecordingChoice,
    open_gateway: Callable[[], Gateway],
    clock: Clock,
    work: OpenWork | None,
) -> RecordedGateway:
    """Open what answers a server's calls. Raises ConveyorError for a directory that cannot be
    recorded into, or answered from."""
    choice.check()
    recorders = _Recorders(open_gateway, clock, work)
    return RecordedGateway(recorders, await recorders.open(choice))


def _directory(choice: RecordingChoice) -> str:
    named = choice.record or choice.replay
    return os.path.realpath(named) if named else ""


def _tell(state: RecordingState) -> None:
    """Log what whoever ended a recording by another one, or by a reset, was not answered."""
    for line in _farewell(state):
        _log.warning("%s", line)


def _farewell(state: RecordingState) -> list[str]:
    said: list[str] = []
    if state.withheld:
        shown = ", ".join(state.hosts[:_SHOWN_HOSTS])
        more = len(state.hosts) - _SHOWN_HOSTS
        others = f" and {more} more hosts" if more > 0 else ""
        said.append(
            f"{WITHHELD}{state.withheld} answers that held a secret of their request, of"
            f" {shown}{others}"
        )
    if not state.is_whole:
        said.append(CUT_SHORT)
    return said
