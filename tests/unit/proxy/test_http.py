"""Ordinary HTTP through the proxy: what arrives in the guest and what comes back, byte for byte."""

import asyncio
import contextlib
import hashlib

import pytest

from agentenv.model.policy import IngressPolicy
from agentenv.proxy import ProxySettings
from agentenv.proxy.route import Via
from tests.unit.proxy.world import API_KEY, WAIT_S, World, answering, on_uvloop, read_request


@on_uvloop
async def test_the_same_path_is_the_guests_or_the_control_apis_by_its_head() -> None:
    async with World() as world:
        guest = await world.guest(answering(b"HTTP/1.1 204 No Content\r\n\r\n", then_close=False), port=49983)
        assert (await world.ask(guest, "/health")).status == 204
        async with world.client() as client:
            assert (await client.ask("/health")).json == {"control": "/health", "body": ""}
        assert world.seen == [(Via.HEADER, "GET", 204)]


@pytest.mark.parametrize("form", ["e2b", "agentenv", "prefix", "host", "localhost"])
@pytest.mark.parametrize("target", ["/", "/a%2Fb/%e2%82%ac?x=%20&y=+&&z", "//double//", "/a/../b/./c", "/q?", "/%00"])
@on_uvloop
async def test_every_form_leads_to_the_same_place_with_path_and_query_untouched(form: str, target: str) -> None:
    async with World() as world:
        guest = await world.guest()
        sandbox_id, port = guest.sandbox.id.encode(), guest.port
        agentenv = b"X-Agentenv-Sandbox-Id: %b\r\nx-agentenv-target-port: %d\r\n" % (sandbox_id, port)
        headers = {
            "e2b": guest.headers,
            "agentenv": agentenv,
            "prefix": agentenv,
            "host": b"Host: %d-%b.sbx.example:8000\r\n" % (port, sandbox_id),
            "localhost": b"Host: %d-%b.localhost:%d\r\n" % (port, sandbox_id, world.port),
        }[form]
        async with world.client() as client:
            answer = await client.ask("/proxy" * (form == "prefix") + target, headers=headers)
        assert answer.status == 200
        assert guest.target == target.removesuffix("?")  # ASGI cannot tell an empty query from none
        assert guest.header("e2b-sandbox-id") + guest.header("x-agentenv-sandbox-id") == []


@on_uvloop
async def test_the_guest_gets_the_clients_host_and_who_it_is() -> None:
    async with World() as world:
        guest = await world.guest()
        await world.ask(guest, headers=b"Host: my.example:81\r\n")
        assert guest.header("host") == ["my.example:81"]
        assert guest.header("x-forwarded-host") == ["my.example:81"]
        assert guest.header("x-forwarded-for") == ["127.0.0.1"]
        assert guest.header("x-forwarded-proto") == ["http"]


@on_uvloop
async def test_a_masked_host_hides_the_real_one() -> None:
    async with World() as world:
        guest = await world.guest(ingress=IngressPolicy(mask_request_host="localhost:${PORT}"))
        await world.ask(guest)
        assert guest.header("host") == [f"localhost:{guest.port}"]


@on_uvloop
async def test_a_client_that_says_no_host_still_has_one_towards_the_guest() -> None:
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(b"GET / HTTP/1.0\r\n%b\r\n" % guest.headers)
            answer = await client.answer()
            assert answer.status == 200
            assert await client.ended() == b""
        assert guest.header("host") == [f"{guest.address}:{guest.port}"]


@on_uvloop
async def test_credentials_of_the_platform_stay_outside() -> None:
    async with World() as world:
        guest = await world.guest()
        await world.ask(
            guest,
            headers=b"X-API-Key: %b\r\nX-API-Key: mine\r\nX-Access-Token: t\r\nX-Agentenv-Control: s\r\n"
            % API_KEY.encode(),
        )
        assert guest.header("x-api-key") == ["mine"]
        assert guest.header("x-access-token") == []
        assert guest.header("x-agentenv-control") == []


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET", "PROPFIND"])
@on_uvloop
async def test_a_body_of_known_length_arrives_as_it_was_sent(method: str) -> None:
    async with World() as world:
        guest = await world.guest()
        body = bytes(range(256)) * 2000
        answer = await world.ask(guest, method=method, body=body)
        assert answer.body == body
        assert guest.bodies == [body]
        assert guest.header("content-length") == [str(len(body))]


@on_uvloop
async def test_a_chunked_body_arrives_whole() -> None:
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n" % guest.headers)
            for part in (b"abc", b"d" * 100_000, b"\r\n0\r\n\r\n"):
                client.send(b"%x\r\n%b\r\n" % (len(part), part))
            client.send(b"0\r\nTrailer: x\r\n\r\n")
            answer = await client.answer()
        assert answer.body == guest.bodies[0] == b"abc" + b"d" * 100_000 + b"\r\n0\r\n\r\n"
        assert guest.header("content-length") == []


@on_uvloop
async def test_an_empty_body_has_a_length_of_nothing() -> None:
    async with World() as world:
        guest = await world.guest()
        assert (await world.ask(guest, method="POST", body=b"")).status == 200
        assert guest.header("content-length") == ["0"]
        assert guest.header("transfer-encoding") == []


@on_uvloop
async def test_an_answer_comes_through_untouched() -> None:
    raw = (
        b"HTTP/1.1 418 I'm a teapot\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Bytes: \xe4\xff\r\n"
        b"Content-Encoding: gzip\r\nDate: yesterday\r\nServer: mine\r\nContent-Length: 3\r\nConnection: X-Hop\r\n"
        b"X-Hop: 1\r\nKeep-Alive: timeout=5\r\n\r\n\x1f\x8b\x08"
    )
    async with World() as world:
        world.default_headers = [(b"date", b"today")]
        guest = await world.guest(answering(raw))
        answer = await world.ask(guest)
        assert answer.status == 418
        assert answer.header("set-cookie") == ["a=1", "b=2"]
        assert answer.header("x-bytes") == ["\xe4\xff"]
        assert answer.header("content-encoding") == ["gzip"]
        assert answer.header("date") == ["yesterday"]
        assert answer.header("server") == ["mine"]
        assert answer.header("x-hop") == answer.header("keep-alive") == []
        assert answer.body == b"\x1f\x8b\x08"


@on_uvloop
async def test_the_control_api_gets_a_date_like_any_server() -> None:
    async with World() as world:
        world.default_headers = [(b"date", b"today")]
        async with world.client() as client:
            assert (await client.ask("/nodes")).header("date") == ["today"]


@pytest.mark.parametrize(
    ("method", "raw", "length"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n", ["1234"]),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", []),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", []),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1234\r\nETag: x\r\n\r\n", []),
    ],
)
@on_uvloop
async def test_answers_without_a_body_leave_both_connections_usable(method: str, raw: bytes, length: list[str]) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(raw)

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            for _ in range(3):
                answer = await client.ask(method=method, headers=guest.headers)
                assert answer.header("content-length") == length
                assert answer.header("transfer-encoding") == []
        assert guest.connections == 1


@on_uvloop
async def test_bodies_without_a_length_end_with_the_guests_connection() -> None:
    async with World() as world:
        guest = await world.guest(answering(b"HTTP/1.1 200 OK\r\n\r\nhello"))
        answer = await world.ask(guest)
        assert answer.header("transfer-encoding") == ["chunked"]
        assert answer.body == b"hello"
        async with world.client() as client:
            client.send(b"GET / HTTP/1.0\r\nHost: x\r\n%b\r\n" % guest.headers)
            answer = await client.answer()
            assert answer.header("transfer-encoding") == []
            assert answer.header("connection") == ["close"]
            assert answer.body == b"hello"


@on_uvloop
async def test_hints_before_the_answer_are_not_the_answer() -> None:
    raw = (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    )
    async with World() as world:
        guest = await world.guest(answering(raw))
        answer = await world.ask(guest)
        assert (answer.status, answer.body) == (200, b"ok")


@on_uvloop
async def test_requests_in_a_row_are_answered_in_order() -> None:
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            for number in range(8):
                client.send(
                    b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 1\r\n\r\n%d" % (guest.headers, number)
                    if number % 2
                    else b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number
                )
            answers = [await client.answer() for _ in range(8)]
        assert [a.body for a in answers[1::2]] == [b"1", b"3", b"5", b"7"]
        assert [a.json["control"] for a in answers[::2]] == ["/0", "/2", "/4", "/6"]


@on_uvloop
async def test_a_client_is_told_to_go_on_when_the_guest_says_so() -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"expect: 100-continue" in head
        asked.set()
        await go_on.wait()
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body)

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 5\r\nExpect: 100-continue\r\n\r\n" % guest.headers
            )
            await asked.wait()
            go_on.set()
            assert (await client.head()).status == 100
            client.send(b"hello")
            assert (await client.answer()).body == b"hello"


@on_uvloop
async def test_a_guest_that_refuses_early_is_not_sent_the_body() -> None:
    rest: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 417 No\r\nContent-Length: 2\r\n\r\nno")
        with contextlib.suppress(ConnectionError):
            rest.append(await reader.read())

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 5\r\nExpect: 100-continue\r\n\r\n" % guest.headers
            )
            answer = await client.answer()
            assert (answer.status, answer.body) == (417, b"no")
            assert answer.header("connection") == ["close"]  # nobody can know whether the body follows
            assert await client.ended() == b""
        await guest.closed.wait()
        assert rest in ([], [b""])


@on_uvloop
async def test_a_guest_that_ignores_expect_gets_the_body_after_a_while() -> None:
    async with World(ProxySettings(continue_timeout_s=0.01)) as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 5\r\nExpect: 100-continue\r\n\r\n" % guest.headers
            )
            assert (await client.head()).status == 100
            client.send(b"hello")
            assert (await client.answer()).body == b"hello"


@on_uvloop
async def test_an_answer_before_the_body_is_sent_reaches_a_client_that_goes_on_sending() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nmuch")
        await reader.read()

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 3000000\r\n\r\n" % guest.headers)
            for _ in range(30):
                client.send(b"z" * 100_000)
            assert (await client.answer()).body == b"much"
            # The client's connection is still good: what was not wanted was read and thrown away.
            assert (await client.ask("/next")).json["control"] == "/next"
        async with asyncio.timeout(WAIT_S):
            await guest.closed.wait()  # the guest's is not: it got half a request
        assert world.proxy.statistics().idle == 0


@on_uvloop
async def test_both_ways_flow_at_once() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while size := int(await reader.readuntil(b"\r\n"), 16):
            chunk = await reader.readexactly(size + 2)
            writer.write(b"%x\r\n%b" % (size, chunk))
        writer.write(b"0\r\n\r\n")

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n" % guest.headers)
            assert (await client.head()).status == 200
            answers = client.chunks()
            for number in range(50):
                client.send(b"4\r\n%04d\r\n" % number)
                assert await anext(answers) == b"%04d" % number
            client.send(b"0\r\n\r\n")
            assert [chunk async for chunk in answers] == []


@on_uvloop
async def test_events_arrive_one_by_one_however_long_it_is_silent_in_between() -> None:
    more = asyncio.Semaphore(0)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(3):
            await more.acquire()
            await asyncio.sleep(0.05)  # ten times what an answer may take to begin
            writer.write(b"8\r\ndata: %d\n\r\n" % number)
        writer.write(b"0\r\n\r\n")

    async with World(ProxySettings(progress_timeout_s=0.005)) as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET /events HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers)
            assert (await client.head()).header("content-type") == ["text/event-stream"]
            events = client.chunks()
            for number in range(3):
                more.release()
                assert await anext(events) == b"data: %d\n" % number


@on_uvloop
async def test_a_large_file_comes_through_and_slow_readers_hold_it_back() -> None:
    size_bytes = 64 << 20
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size_bytes)
        for _ in range(size_bytes >> 16):
            writer.write(b"\x07" * (1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers)
            await client.head()
            held = -1
            while held != sent:  # until nothing moves any more
                held = sent
                await asyncio.sleep(0.05)
            assert sent < 24 << 20  # buffers of three sockets, and not the file
            digest = hashlib.sha256()
            for _ in range(size_bytes >> 16):
                digest.update(await client.reader.readexactly(1 << 16))
            assert digest.digest() == hashlib.sha256(b"\x07" * size_bytes).digest()


@on_uvloop
async def test_a_large_upload_waits_for_a_guest_that_does_not_read() -> None:
    size_bytes = 64 << 20
    may_read = asyncio.Event()
    got = hashlib.sha256()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await may_read.wait()
        for _ in range(size_bytes >> 16):
            got.update(await reader.readexactly(1 << 16))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (guest.headers, size_bytes))
            sent = 0

            async def upload() -> None:
                nonlocal sent
                while sent < size_bytes:
                    client.send(b"\x05" * (1 << 16))
                    await client.writer.drain()
                    sent += 1 << 16

            uploading = asyncio.create_task(upload())
            held = -1
            while held != sent:
                held = sent
                await asyncio.sleep(0.05)
            assert 0 < sent < 24 << 20
            may_read.set()
            assert (await client.answer()).status == 200
            await uploading
        assert got.digest() == hashlib.sha256(b"\x05" * size_bytes).digest()


@on_uvloop
async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with World() as world:
        guest = await world.guest()
        for number in range(5):
            assert (await world.ask(guest, method="POST", body=b"%d" % number)).body == b"%d" % number
        assert guest.connections == 1
        assert world.proxy.statistics().idle == 1
        assert repr(world.proxy) == "<Proxy: <Pool: 0 busy, 1 idle, 1 guests>, 0 inlets>"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
    ],
)
@on_uvloop
async def test_a_connection_that_may_not_serve_another_request_does_not(answer: bytes) -> None:
    async with World() as world:
        guest = await world.guest(answering(answer, then_close=False))
        for _ in range(2):
            assert (await world.ask(guest)).body == b"ok"
        assert guest.connections == 2
        assert world.proxy.statistics().idle == 0


@on_uvloop
async def test_ports_and_sandboxes_do_not_share_connections() -> None:
    async with World() as world:
        one = await world.guest()
        other = await world.guest()
        for guest in (one, other, one, other):
            await world.ask(guest)
        assert (one.connections, other.connections) == (1, 1)
        assert len(one.heads) == len(other.heads) == 2


@on_uvloop
async def test_several_hundred_streams_at_once() -> None:
    release = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        number = head.split(b" ")[1]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n.\r\n")
        await release.wait()
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(number), number))
        await writer.drain()

    async with World() as world:
        guest = await world.guest(handle)
        begun = asyncio.Semaphore(0)

        async def stream(number: int) -> None:
            async with world.client() as client:
                client.send(b"GET /%d HTTP/1.1\r\nHost: x\r\n%b\r\n" % (number, guest.headers))
                await client.head()
                chunks = client.chunks()
                assert await anext(chunks) == b"."
                begun.release()
                assert [chunk async for chunk in chunks] == [b"/%d" % number]

        async with asyncio.TaskGroup() as group:
            for number in range(300):
                group.create_task(stream(number))
            for _ in range(300):
                await begun.acquire()
            assert world.proxy.statistics().busy == 300
            release.set()
        assert guest.connections == 300


@on_uvloop
async def test_a_request_inside_the_body_of_another_stays_a_body() -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\n%bConnection: content-length, x\r\nContent-Length: %d\r\n\r\n%b"
                % (guest.headers, len(inner), inner)
            )
            assert (await client.answer()).body == inner
            assert (await client.ask(headers=guest.headers)).body == b""
        assert [head.split(b" ")[1] for head in guest.heads] == [b"/", b"/"]
