"""Frames survive being cut anywhere."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.mailbox import MAX_FRAME, Framer, MailboxClosed

frames = st.lists(st.binary(max_size=40), max_size=20)


def stream(sent: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in sent)


def cut(data: bytes, places: list[float]) -> list[bytes]:
    borders = sorted({0, len(data), *(round(place * len(data)) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@given(frames, st.lists(st.floats(0, 1), max_size=30))
def test_frames_come_out_as_they_went_in_wherever_the_stream_is_cut(sent: list[bytes], places: list[float]) -> None:
    framer = Framer()
    assert [frame for piece in cut(stream(sent), places) for frame in framer.feed(piece)] == sent


@given(frames)
def test_frames_come_as_soon_as_their_last_byte(sent: list[bytes]) -> None:
    framer, got = Framer(), 0
    done = 0
    data = stream(sent)
    ends = [len(stream(sent[: i + 1])) for i in range(len(sent))]
    for position in range(len(data)):
        got += len(framer.feed(data[position : position + 1]))
        done = sum(end <= position + 1 for end in ends)
        assert got == done


@given(frames, st.integers(MAX_FRAME + 1, 2**32 - 1))
def test_an_impossible_length_is_never_waited_for(sent: list[bytes], length: int) -> None:
    framer = Framer()
    framer.feed(stream(sent))
    with pytest.raises(MailboxClosed):
        framer.feed(struct.pack("<I", length))
