"""Which resolvers are asked, and what counts as their answer."""

import asyncio
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from agentenv.model.errors import Invalid
from agentenv.network.dns.message import parse_query
from agentenv.network.dns.upstream import Upstream, Upstreams, ask_tcp, ask_udp, parse_resolv_conf
from tests.unit.network.names import NameServer, answer, question

OWN = IPv4Address("10.11.255.254")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.1", Upstream(IPv4Address("192.0.2.1"))),
        ("192.0.2.1:5353", Upstream(IPv4Address("192.0.2.1"), 5353)),
        ("2001:db8::1", Upstream(IPv6Address("2001:db8::1"))),
        ("[2001:db8::1]:5353", Upstream(IPv6Address("2001:db8::1"), 5353)),
        ("[2001:db8::1]", Upstream(IPv6Address("2001:db8::1"))),
    ],
)
def test_a_resolver_is_written_as_an_address_with_or_without_a_port(text: str, expected: Upstream) -> None:
    assert Upstream.parse(text) == expected
    assert Upstream.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "dns.example.org", "192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1:x", "[::1", "[::1]:-1"]
)
def test_anything_else_is_invalid(text: str) -> None:
    with pytest.raises(Invalid):
        Upstream.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["127.0.0.1:53"]),
        ("search example.org\n", ["127.0.0.1:53"]),
        ("nameserver 192.0.2.1\nnameserver 192.0.2.1\n", ["192.0.2.1:53"]),
        ("# nameserver 192.0.2.9\n;nameserver 192.0.2.9\nnameserver\t192.0.2.1 # first\n", ["192.0.2.1:53"]),
        ("nameserver nonsense\nnameserver ::1\n", ["[::1]:53"]),
        ("nameserver fe80::1%eth0\n", ["[fe80::1%eth0]:53"]),
        (f"nameserver {OWN}\n", ["127.0.0.1:53"]),
        ("\n".join(f"nameserver 192.0.2.{index}" for index in range(9)), [f"192.0.2.{index}:53" for index in range(4)]),
    ],
)
def test_resolv_conf_is_read_as_the_c_library_does_but_never_leads_to_ourselves(text: str, expected: list[str]) -> None:
    assert [str(upstream) for upstream in parse_resolv_conf(text, own=OWN)] == expected


async def test_a_changed_resolv_conf_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    upstreams = Upstreams((), own=OWN, resolv_conf=path)
    await upstreams.refresh()
    assert [str(upstream) for upstream in upstreams.in_order()] == ["127.0.0.1:53"]  # there is none

    path.write_text("nameserver 192.0.2.1\n")
    await upstreams.refresh()
    assert [str(upstream) for upstream in upstreams.in_order()] == ["192.0.2.1:53"]

    replacement = tmp_path / "new"
    replacement.write_text("nameserver 192.0.2.2\n")
    replacement.replace(path)
    await upstreams.refresh()
    assert [str(upstream) for upstream in upstreams.in_order()] == ["192.0.2.2:53"]

    path.unlink()
    await upstreams.refresh()
    assert [str(upstream) for upstream in upstreams.in_order()] == ["192.0.2.2:53"]  # being rewritten: keep what worked


async def test_what_the_operator_chose_is_not_read_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 192.0.2.1\n")
    upstreams = Upstreams(("192.0.2.8", "192.0.2.9"), own=OWN, resolv_conf=path)

    await upstreams.refresh()

    assert [str(upstream) for upstream in upstreams.in_order()] == ["192.0.2.8:53", "192.0.2.9:53"]
    upstreams.answered(Upstream(IPv4Address("192.0.2.9")))
    assert [str(upstream) for upstream in upstreams.in_order()] == ["192.0.2.9:53", "192.0.2.8:53"]


async def test_only_an_answer_to_the_question_is_taken() -> None:
    def respond(data: bytes) -> list[bytes]:
        forged = answer(question("example.net", query_id=int.from_bytes(data[:2], "big")), "192.0.2.66")
        other_id = bytes([data[0] ^ 1]) + answer(data, "192.0.2.66")[1:]
        return [b"", b"nonsense", forged, other_id, answer(data)]

    server = await NameServer(respond).start()
    try:
        query = parse_query(question())
        async with asyncio.timeout(10):
            reply = await ask_udp(Upstream.parse(server.text), query)
    finally:
        await server.stop()

    assert reply[2:] == answer(question())[2:]


async def test_each_question_has_an_id_and_a_port_of_its_own() -> None:
    server = await NameServer().start()
    try:
        for _ in range(50):
            await ask_udp(Upstream.parse(server.text), parse_query(question(query_id=1)))
    finally:
        await server.stop()

    ids = {data[:2] for _, data in server.asked}
    assert len(ids) > 40
    assert len(set(server.sources)) > 40


async def test_an_answer_from_elsewhere_is_never_seen() -> None:
    silent, forger = await NameServer(lambda _: []).start(), await NameServer().start()
    try:
        asking = asyncio.create_task(ask_udp(Upstream.parse(silent.text), parse_query(question())))
        await silent.arrived.wait()
        forger._transport.sendto(answer(silent.asked[0][1], "192.0.2.66"), ("127.0.0.1", silent.sources[0]))
        forger._transport.sendto(answer(silent.asked[0][1]), ("127.0.0.1", forger.port))  # passes the loop after it
        await forger.arrived.wait()
        assert not asking.done()
        silent._transport.sendto(answer(silent.asked[0][1]), ("127.0.0.1", silent.sources[0]))
        async with asyncio.timeout(10):
            assert await asking == answer(silent.asked[0][1])
    finally:
        await silent.stop()
        await forger.stop()


async def test_a_long_answer_comes_over_tcp() -> None:
    server = await NameServer(lambda data: [answer(data, padding=30_000)]).start()
    try:
        reply = await ask_tcp(Upstream.parse(server.text), parse_query(question()))
    finally:
        await server.stop()

    assert len(reply) > 30_000


@pytest.mark.parametrize("respond", [lambda _: [], lambda data: [answer(question("example.net"))]])
async def test_a_server_that_hangs_up_or_answers_something_else_over_tcp_is_an_error(respond: object) -> None:
    server = await NameServer(respond).start()  # type: ignore[arg-type]
    try:
        with pytest.raises(OSError, match="name server"):
            await ask_tcp(Upstream.parse(server.text), parse_query(question()))
    finally:
        await server.stop()
