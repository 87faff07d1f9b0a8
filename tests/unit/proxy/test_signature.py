"""A signed link is found by the one token that made it."""

import hashlib
from base64 import b64encode
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.proxy.signature import parse_signed

texts = st.text(st.characters(codec="utf-8"), max_size=30)


def sign(path: str, operation: str, username: str, token: str, expiration: str | None) -> str:
    """As the clients do it."""
    raw = f"{path}:{operation}:{username}:{token}" + (f":{expiration}" if expiration is not None else "")
    return "v1_" + b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")


@given(texts, texts, texts, st.none() | st.integers(0, 2**40).map(str), st.sampled_from(["GET", "HEAD", "POST"]))
def test_the_token_that_signed_matches_and_no_other(
    path: str, username: str, token: str, expiration: str | None, method: str
) -> None:
    signature = sign(path, "write" if method == "POST" else "read", username, token, expiration)
    fields = {"path": path, "username": username, "signature": signature}
    if expiration is not None:
        fields["signature_expiration"] = expiration
    signed = parse_signed(method, urlencode(fields, quote_via=quote).encode())
    assert signed is not None
    assert signed.matches(token)
    assert not signed.matches(token + "x")


def test_a_link_to_read_does_not_match_as_one_to_write() -> None:
    query = urlencode({"path": "/a", "signature": sign("/a", "read", "", "t", None)}).encode()
    reading, writing = parse_signed("GET", query), parse_signed("POST", query)
    assert reading is not None
    assert reading.matches("t")
    assert writing is not None
    assert not writing.matches("t")


def test_an_expiration_cannot_be_left_out() -> None:
    signature = sign("/a", "read", "", "t", "1700000000")
    signed = parse_signed("GET", urlencode({"path": "/a", "signature": signature}).encode())
    assert signed is not None
    assert not signed.matches("t")


@pytest.mark.parametrize(
    "query",
    [b"", b"path=a", b"signature=", b"signature=v1_x&path=%ff", b"signature=\xff", b"signature=v1_x&" + b"a=b&" * 40],
)
def test_a_query_that_cannot_be_a_signed_link_is_none(query: bytes) -> None:
    assert parse_signed("GET", query) is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_and_writing_are_signed(method: str) -> None:
    assert parse_signed(method, b"path=a&signature=v1_x") is None


@given(st.binary(max_size=200))
def test_no_query_is_too_strange(query: bytes) -> None:
    signed = parse_signed("GET", b"signature=x&" + query)
    assert signed is None or not signed.matches("token")
