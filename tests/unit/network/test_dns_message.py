"""The DNS message format, as far as a forwarder looks."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.network.dns.message import NotAQuestion, Query, Rcode, Unanswerable, is_truncated, parse_query
from tests.unit.network.names import AXFR, answer, name, question, rcode, section

ID = b"\xab\xcd"


def test_a_query_goes_on_under_another_id_and_is_otherwise_the_same() -> None:
    query = parse_query(question(size=1232))

    assert query.with_id(ID) == ID + question(size=1232)[2:]


def test_its_answer_comes_back_under_the_askers_id() -> None:
    data = question()
    query = parse_query(data)
    reply = answer(query.with_id(ID))

    assert query.accepts(reply, ID)
    assert query.answer(reply, udp=True) == answer(data)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        answer(question("example.org", query_id=0xABCD))[:11],
        answer(question("example.org", query_id=0xABCE)),  # another id
        answer(question("example.net", query_id=0xABCD)),  # another name
        answer(question("example.org", query_id=0xABCD, kind=28)),  # another type
        question("example.org", query_id=0xABCD),  # not an answer
        answer(question("example.org", query_id=0xABCD), flags=0x2800),  # another operation
        ID + struct.pack("!HHHHH", 0x8180, 0, 0, 0, 0),  # success, but to what?
        ID + struct.pack("!HHHHH", 0x8180, 2, 0, 0, 0) + 2 * section(question()),
    ],
)
def test_what_does_not_fit_the_question_is_no_answer(reply: bytes) -> None:
    assert not parse_query(question("example.org")).accepts(reply, ID)


def test_a_server_may_change_the_case_of_the_name() -> None:
    query = parse_query(question("eXample.org"))

    assert query.accepts(answer(question("Example.ORG", query_id=0xABCD)), ID)


def test_an_error_without_the_question_is_told_to_the_asker_with_it() -> None:
    query = parse_query(question(query_id=7))
    refused = ID + struct.pack("!HHHHH", 0x8185, 0, 0, 0, 0)

    assert query.accepts(refused, ID)
    told = query.answer(refused, udp=True)
    assert (told[:2], rcode(told), section(told)) == (b"\0\7", Rcode.REFUSED, section(question()))


@pytest.mark.parametrize(
    ("size", "length", "cut"),
    [(None, 512, False), (None, 513, True), (100, 512, False), (1232, 1232, False), (1232, 1233, True)],
)
def test_an_answer_longer_than_the_asker_takes_over_udp_is_cut(size: int | None, length: int, cut: bool) -> None:
    query = parse_query(question(size=size))
    reply = answer(query.with_id(ID)).ljust(length, b"\0")

    told = query.answer(reply, udp=True)

    assert is_truncated(told) == cut
    assert len(told) == (length if not cut else 12 + len(section(told)))
    assert len(query.answer(reply, udp=False)) == length


@pytest.mark.parametrize("data", [b"", question()[:11], answer(question())])
def test_what_asks_nothing_gets_no_answer(data: bytes) -> None:
    with pytest.raises(NotAQuestion):
        parse_query(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (question(flags=0x2900), Rcode.NOT_IMPLEMENTED),  # an update
        (struct.pack("!HHHHHH", 1, 0x100, 0, 0, 0, 0), Rcode.FORMAT_ERROR),
        (struct.pack("!HHHHHH", 1, 0x100, 2, 0, 0, 0) + 2 * section(question()), Rcode.FORMAT_ERROR),
        (struct.pack("!HHHHHH", 1, 0x100, 1, 1, 0, 0) + section(question()), Rcode.FORMAT_ERROR),
        (question()[:-1], Rcode.FORMAT_ERROR),
        (
            struct.pack("!HHHHHH", 1, 0x100, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1",
            Rcode.FORMAT_ERROR,
        ),  # a name that is itself
        (struct.pack("!HHHHHH", 1, 0x100, 1, 0, 0, 0) + name(".".join(["x" * 63] * 5)) + bytes(4), Rcode.FORMAT_ERROR),
        (question(kind=AXFR), Rcode.REFUSED),
    ],
)
def test_what_cannot_be_answered_gets_an_error_under_its_own_id(data: bytes, expected: Rcode) -> None:
    with pytest.raises(Unanswerable) as refused:
        parse_query(data)

    assert refused.value.reply[:2] == data[:2]
    assert refused.value.reply[2] & 0x80
    assert rcode(refused.value.reply) == expected


@given(st.one_of(st.binary(max_size=600), st.builds(lambda tail: question()[:12] + tail, st.binary(max_size=300))))
def test_no_message_breaks_the_parser(data: bytes) -> None:
    with suppress(NotAQuestion, Unanswerable):
        query = parse_query(data)
        assert query.data == data
        assert len(query.failure(Rcode.SERVER_FAILURE)) <= len(data)


@given(st.binary(max_size=600))
def test_no_answer_breaks_the_check(reply: bytes) -> None:
    query: Query = parse_query(question())

    if query.accepts(reply, ID):
        assert query.answer(reply, udp=True)[:2] == query.id
