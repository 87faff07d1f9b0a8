"""Requests from bytes: what two readers could understand differently is not understood at all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.proxy.headers import Framing
from agentenv.proxy.inbound.limits import ServerLimits
from agentenv.proxy.inbound.reader import Broken, Data, End, Event, Head, RequestReader

LIMITS = ServerLimits()
HOST = b"Host: x\r\n"


def read(*parts: bytes, limits: ServerLimits = LIMITS) -> list[Event]:
    reader = RequestReader(limits)
    return [event for part in parts for event in reader.feed(part)]


def joined(events: list[Event]) -> list[Event | bytes]:
    """With neighbouring parts of a body made one."""
    result: list[Event | bytes] = []
    for event in events:
        if isinstance(event, Data) and result and isinstance(result[-1], bytes):
            result[-1] += event.content
        else:
            result.append(event.content if isinstance(event, Data) else event)
    return result


def heads(events: list[Event]) -> list[Head]:
    return [event for event in events if isinstance(event, Head)]


@given(st.lists(st.integers(1, 300), max_size=12))
def test_packets_do_not_matter(cuts: list[int]) -> None:
    whole = (
        b"POST /a%20b?q=1&q HTTP/1.1\r\nHost: x\r\nX: 1\r\nx: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2;e=f\r\nde\r\n0\r\nE2b-Sandbox-Id: evil\r\n\r\n"
        b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\nwxyz"
        b"\r\nGET //c HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    first, body, end, second, second_body, _, third, last = joined(
        read(*(whole[a:b] for a, b in itertools.pairwise(edges)))
    )
    assert isinstance(first, Head)
    assert (first.method, first.path, first.query) == ("POST", b"/a%20b", b"q=1&q")
    assert first.headers == [(b"host", b"x"), (b"x", b"1"), (b"x", b"2"), (b"transfer-encoding", b"chunked")]
    assert body == b"abcde"
    assert end == End()
    assert isinstance(second, Head)
    assert second.body == Framing(4, chunked=False)
    assert second_body == b"wxyz"
    assert isinstance(third, Head)
    assert third.path == b"//c"
    assert last == End()


@pytest.mark.parametrize(
    "smuggled",
    [
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3, 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0x3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",  # obs-fold
        b"GET / HTTP/1.1\r\n X: a\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\nY: z\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\rY: z\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\0y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET a HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET ftp://x/ HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(smuggled: bytes) -> None:
    events = read(smuggled)
    assert heads(events) == []
    assert isinstance(events[-1], Broken)
    assert 400 <= events[-1].status < 600


@pytest.mark.parametrize(
    "chunk", [b"3\nabc\r\n", b"3 \r\nabc\r\n", b"-3\r\nabc\r\n", b"0x3\r\nabc\r\n", b"3\r\nabcd\r\n"]
)
def test_a_body_in_bad_chunks_is_never_complete(chunk: bytes) -> None:
    events = read(b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n")
    assert End() not in events
    assert isinstance(events[-1], Broken)


def test_nothing_is_read_after_a_refusal() -> None:
    reader = RequestReader(LIMITS)
    assert isinstance(reader.feed(b"BREW / HTTP/1.1\r\n\r\n")[-1], Broken)
    assert reader.feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == []


@pytest.mark.parametrize(
    "bomb",
    [
        b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + (b"x: " + b"y" * 400 + b"\r\n") * 180 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"x: y\r\n" * 250 + b"\r\n",
    ],
)
@pytest.mark.parametrize("packet_bytes", [1000, 1_000_000])
def test_a_head_has_a_bounded_size(bomb: bytes, packet_bytes: int) -> None:
    events = read(*(bomb[at : at + packet_bytes] for at in range(0, len(bomb), packet_bytes)))
    assert events == [Broken(431, events[-1].message)]  # type: ignore[union-attr]


CHUNKED = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "forever",
    [
        b"GET /" + b"a" * 1000,
        b"GET / HTTP/1.1\r\nX",
        b"\r\n",
        b"G",
        CHUNKED + b"3;x=",
        CHUNKED + b"3\r\nabc\r\n0\r\nx: ",
    ],
)
def test_a_head_that_never_ends_is_refused_in_the_end(forever: bytes) -> None:
    reader = RequestReader(LIMITS)
    fill = b"\r\n" * 500 if forever == b"\r\n" else b"a" * 1000
    events = reader.feed(forever)
    for _ in range(100):
        events += reader.feed(fill)
    assert isinstance(events[-1], Broken)


def test_trailers_without_end_are_refused_in_the_end() -> None:
    reader = RequestReader(LIMITS)
    events = reader.feed(CHUNKED + b"0\r\n")
    for _ in range(LIMITS.max_head_bytes // 1000 + 2):
        events += reader.feed(b"x: y\r\n" * 166)
    assert isinstance(events[-1], Broken)
    assert End() not in events


def test_the_size_counts_for_each_head_anew() -> None:
    request = b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 40_000 + b"\r\n\r\n"
    events = read(*([request] * 5), request * 5)
    assert len(heads(events)) == 10


def test_the_target_says_which_host_is_meant() -> None:
    (head, _) = read(b"GET http://3000-x.example/a?b HTTP/1.1\r\nHost: api.example\r\nX: y\r\n\r\n")
    assert isinstance(head, Head)
    assert head.headers == [(b"host", b"3000-x.example"), (b"x", b"y")]
    assert (head.path, head.query) == (b"/a", b"b")


@pytest.mark.parametrize(("target", "path", "query"), [(b"http://h", b"/", b""), (b"HTTP://h?q", b"/", b"q")])
def test_a_target_without_a_path_means_the_root(target: bytes, path: bytes, query: bytes) -> None:
    (head, _) = read(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert isinstance(head, Head)
    assert (head.path, head.query) == (path, query)


def test_an_asterisk_is_a_target() -> None:
    (head, _) = read(b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n")
    assert isinstance(head, Head)
    assert head.path == b"*"


UPGRADE = b"GET /ws HTTP/1.1\r\n" + HOST + b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n"


def test_what_follows_an_upgrade_is_given_back_if_it_is_taken() -> None:
    reader = RequestReader(LIMITS)
    head, end = reader.feed(UPGRADE + b"\x81\x00")
    assert isinstance(head, Head)
    assert head.may_upgrade
    assert end == End()
    assert reader.feed(b"more") == []
    assert reader.leave() == b"\x81\x00more"


def test_what_follows_an_upgrade_is_the_next_request_if_it_is_not_taken() -> None:
    reader = RequestReader(LIMITS)
    reader.feed(UPGRADE + b"GET /next HTTP/1.1\r\nHost: x\r\n")
    assert [event.path for event in heads(reader.resume() + reader.feed(b"\r\n"))] == [b"/next"]


@pytest.mark.parametrize("framing", [b"Content-Length: 12", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_the_body_of_a_request_that_offers_an_upgrade_is_its_body(framing: bytes, protocol: bytes) -> None:
    body = b"GET /smuggle" if framing.startswith(b"Content") else b"c\r\nGET /smuggle\r\n0\r\n\r\n"
    whole = (
        b"POST /first HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n" + framing
        + b"\r\n\r\n" + body + b"GET /second HTTP/1.1\r\n" + HOST + b"\r\n"
    )  # fmt: skip
    for parts in ([whole], [whole[at : at + 1] for at in range(len(whole))]):
        first, content, end, second, _ = joined(read(*parts))
        assert isinstance(first, Head)
        assert not first.may_upgrade
        assert content == b"GET /smuggle"
        assert end == End()
        assert isinstance(second, Head)
        assert second.path == b"/second"


def test_h2c_is_not_taken_up() -> None:
    first, _, second, _ = read(
        b"GET /a HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
        b"GET /b HTTP/1.1\r\n" + HOST + b"\r\n"
    )
    assert isinstance(first, Head)
    assert not first.may_upgrade
    assert isinstance(second, Head)
    assert second.path == b"/b"


@pytest.mark.parametrize(("connection", "keeps"), [(b"", True), (b"Connection: close\r\n", False)])
def test_whether_another_request_may_follow(connection: bytes, keeps: bool) -> None:
    (head, _) = read(b"GET / HTTP/1.1\r\n" + HOST + connection + b"\r\n")
    assert isinstance(head, Head)
    assert head.keep_alive is keeps


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=5))
def test_no_bytes_do_worse_than_a_refusal(parts: list[bytes]) -> None:
    reader = RequestReader(LIMITS)
    for part in parts:
        for event in reader.feed(b"GET / HTTP/1.1\r\nHost: x\r\n" + part):
            assert isinstance(event, Head | Data | End | Broken)
