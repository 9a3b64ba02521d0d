"""The frames between the server and the child process."""

from __future__ import annotations

import pytest

from conveyor.domain.errors import ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.submission import Limits, parse_job
from conveyor.intake.frames import Chunk, Done, Frame, Head, Refusal, decode_frame, encode_frame
from tests.unit.intake_lists import split_frames

REQUEST = parse_job({"name": "ä", "status": "open", "zenrows_params": {"wait": 5}}, Limits())
INVALID = (InvalidTask(7, InvalidTaskReason.MALFORMED_URL, "x"),)
FRAMES: list[Frame] = [
    Head(REQUEST, 12),
    Chunk(10_000, 2, b'[["0",{}]]\n\x00\xff'),
    Chunk(2**33, 0, b""),
    Done(12, 34),
    Refusal(ErrorCode.QUOTA_EXCEEDED, "too many"),
    Refusal(ErrorCode.INVALID_ARGUMENT, "bad", INVALID),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_back_as_it_was(frame: Frame) -> None:
    assert list(split_frames(b"".join(encode_frame(frame)))) == [frame]


def test_frames_in_a_row_keep_apart() -> None:
    content = b"".join(piece for frame in FRAMES for piece in encode_frame(frame))
    assert list(split_frames(content)) == FRAMES


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such frame: b'X'"):
        decode_frame(b"X", b"")
