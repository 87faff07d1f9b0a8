"""Framing: whatever the cuts, the same frames; whatever the bytes, frames or an error of a kind."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest.connect import MAX_FRAME_BYTES, Frame, FrameReader, encode_frame
from agentenv.model.errors import Unavailable

messages = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=4)


@given(st.lists(st.tuples(messages, st.booleans()), max_size=6), st.lists(st.integers(1, 9)))
def test_what_was_framed_is_read_back_wherever_it_is_cut(
    sent: list[tuple[dict[str, object], bool]], cuts: list[int]
) -> None:
    stream = b"".join(encode_frame(message, end=end) for message, end in sent)
    reader = FrameReader()
    read: list[Frame] = []

    for length in [*cuts, len(stream) + 1]:
        read += reader.feed(stream[:length])
        stream = stream[length:]

    assert [(frame.message, frame.end) for frame in read] == sent


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_unavailable(stream: bytes) -> None:
    with suppress(Unavailable):
        list(FrameReader().feed(stream))


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    with pytest.raises(Unavailable):
        list(FrameReader().feed(struct.pack(">BI", 0, MAX_FRAME_BYTES + 1)))
