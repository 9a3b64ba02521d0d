"""The JSON document of a submit: checked as a whole, then brought into rows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from conveyor.domain.strict_json import decode
from conveyor.domain.submission import JobRequest, parse_job
from conveyor.intake.frames import Done, Frame, Head, Work
from conveyor.intake.rows import RowWriter

_STEP = 500


def read_document(read: Callable[[], bytes], work: Work, emit: Callable[[Frame], None]) -> Done:
    """Emit the Head and the Chunks of the document that `read` gives.

    Raises ConveyorError as parse_job does, before anything is emitted.
    """
    request = _checked(read, work)
    specs = request.specs
    emit(Head(msgspec.structs.replace(request, specs=[]), len(specs)))
    writer = RowWriter(work.run_id, emit)
    for start in range(0, len(specs), _STEP):
        writer.add(specs[start : start + _STEP])
    return writer.finish()


def _checked(read: Callable[[], bytes], work: Work) -> JobRequest:
    # No name here for the bytes and the raw document, or they would lie in memory for longer.
    return parse_job(decode(read()), work.limits)
