"""What crosses the proxy, in both directions, and what never does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import Bug
from agentenv.proxy.headers import (
    Client,
    Framing,
    answer_headers,
    expects_continue,
    framing,
    guest_host,
    request_head,
    upgrade_wanted,
)

NO_BODY = Framing(None, chunked=False)
SOMEONE = Client("192.0.2.7", "http")

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20).map(str.encode)
values = st.binary(max_size=30).filter(lambda value: not {0, 10, 13} & set(value))


def sent(headers: list[tuple[bytes, bytes]], *, port: int = 8080, body: Framing = NO_BODY, api_key: str | None = None):  # type: ignore[no-untyped-def]
    head = request_head("GET", b"/", headers, body, SOMEONE, port=port, host=b"h", api_key=api_key)
    assert head.endswith(b"\r\n\r\n")
    lines = head[:-4].split(b"\r\n")
    assert lines[0] == b"GET / HTTP/1.1"
    return [tuple(line.split(b": ", 1)) for line in lines[1:]]


def names_of(pairs: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {name for name, _ in pairs}


@given(st.lists(st.tuples(names.map(lambda name: b"z-" + name), values), max_size=10))
def test_ordinary_headers_keep_their_order_and_bytes(headers: list[tuple[bytes, bytes]]) -> None:
    assert [pair for pair in sent(headers) if pair[0].startswith(b"z-")] == headers
    assert answer_headers(headers, 200) == headers


@pytest.mark.parametrize(
    "name",
    [
        b"connection",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
        b"e2b-sandbox-id",
        b"e2b-sandbox-port",
        b"e2b-traffic-access-token",
        b"x-agentenv-sandbox-id",
        b"x-agentenv-target-port",
        b"x-agentenv-control",
    ],
)
@pytest.mark.parametrize("port", [8080, 49983])
def test_what_is_not_for_the_guest_does_not_reach_it(name: bytes, port: int) -> None:
    assert name not in names_of(sent([(name, b"x"), (b"accept", b"y")], port=port))


def test_what_connection_names_goes_with_it_but_not_the_framing() -> None:
    headers = [(b"connection", b"close, X-Hop , content-length, host"), (b"x-hop", b"1"), (b"content-length", b"3")]
    pairs = sent(headers, body=Framing(3, chunked=False))
    assert b"x-hop" not in names_of(pairs)
    assert (b"content-length", b"3") in pairs
    assert names_of(answer_headers(headers, 200)) == {b"content-length"}


def test_the_platforms_key_stays_and_a_key_of_the_application_passes() -> None:
    headers = [(b"x-api-key", b"platform"), (b"x-api-key", b"mine")]
    assert [value for name, value in sent(headers, api_key="platform") if name == b"x-api-key"] == [b"mine"]


def test_the_agents_token_reaches_the_agent_only() -> None:
    assert (b"x-access-token", b"t") in sent([(b"x-access-token", b"t")], port=49983)
    assert b"x-access-token" not in names_of(sent([(b"x-access-token", b"t")], port=49984))


def test_the_guest_hears_who_asks() -> None:
    pairs = dict(sent([(b"host", b"real.example")]))
    assert pairs[b"x-forwarded-for"] == b"192.0.2.7"
    assert pairs[b"x-forwarded-host"] == b"real.example"
    assert pairs[b"x-forwarded-proto"] == b"http"


def test_a_proxy_in_front_is_believed_and_added_to() -> None:
    headers = [
        (b"host", b"real.example"),
        (b"x-forwarded-for", b"198.51.100.1"),
        (b"x-forwarded-for", b"198.51.100.2"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"outer.example"),
    ]
    pairs = sent(headers)
    assert [value for name, value in pairs if name == b"x-forwarded-for"] == [b"198.51.100.1, 198.51.100.2, 192.0.2.7"]
    assert [value for name, value in pairs if name == b"x-forwarded-proto"] == [b"https"]
    assert [value for name, value in pairs if name == b"x-forwarded-host"] == [b"outer.example"]


def test_a_body_is_framed_as_it_came() -> None:
    chunked = sent([(b"transfer-encoding", b"chunked")], body=Framing(None, chunked=True))
    assert (b"transfer-encoding", b"chunked") in chunked
    assert b"content-length" not in names_of(chunked)


def test_the_host_is_masked_where_that_is_asked_for() -> None:
    headers = [(b"host", b"8080-x.example")]
    assert guest_host(headers, "localhost:${PORT}", address="10.0.0.1", port=8080) == b"localhost:8080"
    assert guest_host(headers, None, address="10.0.0.1", port=8080) == b"8080-x.example"
    assert guest_host([], None, address="10.0.0.1", port=8080) == b"10.0.0.1:8080"


@pytest.mark.parametrize("mask", ["a\r\nx: y", "a b", "ä", "a\0"])
def test_a_mask_cannot_smuggle(mask: str) -> None:
    with pytest.raises(Bug):
        guest_host([], mask, address="10.0.0.1", port=8080)


def test_several_cookies_stay_several() -> None:
    cookies = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2, c"), (b"content-encoding", b"br")]
    assert answer_headers(cookies, 200) == cookies


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_has_no_body_has_no_length(status: int) -> None:
    assert answer_headers([(b"content-length", b"7"), (b"etag", b"x")], status) == [(b"etag", b"x")]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], NO_BODY),
        ([(b"content-length", b"0")], Framing(0, chunked=False)),
        ([(b"content-length", b"12")], Framing(12, chunked=False)),
        ([(b"transfer-encoding", b"Chunked ")], Framing(None, chunked=True)),
        ([(b"content-length", b"1"), (b"content-length", b"1")], None),
        ([(b"content-length", b"1"), (b"transfer-encoding", b"chunked")], None),
        ([(b"content-length", b"+1")], None),
        ([(b"content-length", b"1, 1")], None),
        ([(b"content-length", b"")], None),
        ([(b"content-length", b"1_0")], None),
        ([(b"transfer-encoding", b"gzip, chunked")], None),
        ([(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], None),
        ([(b"transfer-encoding", b"identity")], None),
    ],
)
def test_a_request_has_one_framing_or_is_none(headers: list[tuple[bytes, bytes]], expected: Framing | None) -> None:
    assert framing(headers) == expected


def test_an_upgrade_is_offered_by_both_headers() -> None:
    both = [(b"connection", b"keep-alive, Upgrade"), (b"upgrade", b"websocket")]
    assert upgrade_wanted(both) == b"websocket"
    assert upgrade_wanted(both[:1]) is None
    assert upgrade_wanted(both[1:]) is None
    assert upgrade_wanted([*both, (b"upgrade", b"h2c")]) is None


def test_expect_is_recognised() -> None:
    assert expects_continue([(b"expect", b"100-Continue")])
    assert not expects_continue([(b"expect", b"other")])
