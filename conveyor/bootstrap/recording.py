"""Wire a recording between a development server and its gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.gateway.recording import RecordingGateway, ReplayGateway
from conveyor.gateway.redaction import SecretNames, usual_names
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.ports.idle import OpenWork

MISSING = ("fail", "pass", "record")
_SHOWN_HOSTS = 10


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


@dataclass(frozen=True, slots=True)
class RecordedGateway:
    """A gateway, and `farewell`: what to say about its recording once it is closed."""

    gateway: Gateway
    farewell: Callable[[], Sequence[str]] = tuple


async def open_recorded(
    choice: RecordingChoice,
    open_gateway: Callable[[], Gateway],
    clock: Clock,
    work: OpenWork | None,
) -> RecordedGateway:
    """Open what answers a server's calls. Raises ConveyorError for a directory that cannot be
    recorded into, or answered from."""
    choice.check()
    if not choice.record and not choice.replay:
        return RecordedGateway(open_gateway())
    from conveyor.dev.recordings import open_recorder, open_recordings

    if choice.record:
        recorder = await open_recorder(Path(choice.record), work)
        recording = RecordingGateway(open_gateway(), recorder, clock, choice.names, work)
        return RecordedGateway(recording, lambda: _farewell(recording))
    adds = choice.missing == "record"
    recordings = await open_recordings(Path(choice.replay), adds=adds, work=work)
    if choice.calls_nobody:
        return RecordedGateway(ReplayGateway(recordings, names=choice.names))
    other = open_gateway()
    if not adds:
        return RecordedGateway(ReplayGateway(recordings, other, choice.names))
    adding = RecordingGateway(other, recordings.recorder(), clock, choice.names, work)
    replay = ReplayGateway(recordings, adding, choice.names)
    return RecordedGateway(replay, lambda: _farewell(adding))


def _farewell(recording: RecordingGateway) -> list[str]:
    said: list[str] = []
    answers, hosts = recording.withheld
    if answers:
        shown = ", ".join(hosts[:_SHOWN_HOSTS])
        more = len(hosts) - _SHOWN_HOSTS
        others = f" and {more} more hosts" if more > 0 else ""
        said.append(
            f"not recorded: {answers} answers that held a secret of their request, of"
            f" {shown}{others}"
        )
    if not recording.is_whole:
        said.append("the recording could not be written to its end; a new one is of no use")
    return said
