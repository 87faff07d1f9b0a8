"""A guest's answer, however it is cut into packets, is read the same way or refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest.answer import MAX_HEAD_BYTES, MAX_HEADERS, AnswerReader, GuestGarbage


def read(*parts: bytes, head_only: bool = False) -> AnswerReader:
    reader = AnswerReader(head_only=head_only)
    for part in parts:
        reader.feed(part)
    return reader


@given(st.lists(st.integers(1, 120), max_size=12))
def test_packets_do_not_matter(cuts: list[int]) -> None:
    whole = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n"
        b"HTTP/1.1 201 Made\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nTrailer: t\r\n\r\n"
    )
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    reader = read(*(whole[a:b] for a, b in itertools.pairwise(edges)))
    assert reader.head is not None
    assert reader.head.status == 201
    assert reader.head.headers == [(b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"transfer-encoding", b"chunked")]
    assert reader.is_continued
    assert reader.take_body() == b"abcdefg"
    assert reader.is_complete
    assert reader.keep_alive


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader = read(b"HTTP/1.1 200 OK\r\n\r\nabc")
    was_complete = reader.is_complete
    reader.feed_eof()
    assert (was_complete, reader.is_complete, reader.keep_alive) == (False, True, False)


@pytest.mark.parametrize(
    "cut_short",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_an_answer_that_is_cut_short_is_never_complete(cut_short: bytes) -> None:
    reader = read(cut_short) if cut_short else AnswerReader(head_only=False)
    reader.feed_eof()
    assert not reader.is_complete


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_is_complete_at_once(status: int) -> None:
    reader = read(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status)
    assert reader.is_complete
    assert reader.keep_alive


def test_the_answer_to_head_has_a_length_and_no_body() -> None:
    reader = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", head_only=True)
    assert reader.is_complete
    assert reader.keep_alive


def test_a_body_after_head_spoils_the_connection_and_not_the_answer() -> None:
    reader = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde", head_only=True)
    assert reader.is_complete
    assert not reader.keep_alive
    assert reader.take_body() == b""


@pytest.mark.parametrize(
    "more", [b"H", b"junk", b"HTTP/1.1 junk", b"HTTP/1.1 201 Evil\r\nContent-Length: 4\r\n\r\nevil", b"\r\nHTTP"]
)
def test_more_than_the_answer_spoils_the_connection_and_not_the_answer(more: bytes) -> None:
    reader = read(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + more)
    assert reader.is_complete
    assert reader.head is not None
    assert reader.head.status == 200
    assert reader.take_body() == b"ok"
    assert not reader.keep_alive


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_guest_that_closes_is_not_kept(version: bytes) -> None:
    reader = read(b"HTTP/%b 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok" % version)
    assert reader.is_complete
    assert not reader.keep_alive


def test_bare_line_feeds_are_understood() -> None:
    reader = read(b"HTTP/1.1 200 OK\nContent-Length: 2\nX: y\n\nok")
    assert reader.head is not None
    assert reader.head.headers == [(b"content-length", b"2"), (b"x", b"y")]
    assert reader.take_body() == b"ok"


def test_what_follows_a_switch_is_kept() -> None:
    reader = read(b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x00")
    assert reader.is_switched
    assert reader.rest == b"\x81\x00"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00",  # TLS
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 99 X\r\n\r\n",
        b"HTTP/1.1 999 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 S\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_garbage_is_called_that(garbage: bytes) -> None:
    with pytest.raises(GuestGarbage):
        read(garbage)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("forever", [b"HTTP/1.1 200 OK\r\nx: ", CHUNKED + b"3;", CHUNKED + b"0\r\nx: "])
def test_what_never_ends_is_given_up_on(forever: bytes) -> None:
    with pytest.raises(GuestGarbage):
        read(forever, *([b"a" * 1000] * (MAX_HEAD_BYTES // 1000 + 1)))


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5))
def test_no_bytes_do_worse_than_garbage(parts: list[bytes]) -> None:
    reader = AnswerReader(head_only=False)
    try:
        for part in parts:
            reader.feed(part)
    except GuestGarbage:
        return
    reader.feed_eof()
    assert not reader.is_complete or reader.head is not None


def test_interim_answers_have_an_end() -> None:
    reader = AnswerReader(head_only=False)

    with pytest.raises(GuestGarbage):
        reader.feed(1000 * b"HTTP/1.1 100 Continue\r\n\r\n")
