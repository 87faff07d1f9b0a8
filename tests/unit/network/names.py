"""Name servers and questions for tests: messages are made here by hand, not by the code under test."""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

A, AAAA, TXT, AXFR = 1, 28, 16, 252


def name(text: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in text.split(".")) + b"\0"


def question(
    text: str = "example.org", *, kind: int = A, query_id: int = 0x1234, flags: int = 0x0100, size: int | None = None
) -> bytes:
    """A query as a resolver sends it; with *size*, one that takes longer answers over UDP."""
    extra = b"" if size is None else b"\0" + struct.pack("!HHIH", 41, size, 0, 0)
    header = struct.pack("!HHHHHH", query_id, flags, 1, 0, 0, size is not None)
    return header + name(text) + struct.pack("!HH", kind, 1) + extra


def section(query: bytes) -> bytes:
    """The question of a message without compression."""
    return query[12 : query.index(b"\0", 12) + 5]


def answer(query: bytes, address: str = "192.0.2.7", *, rcode: int = 0, flags: int = 0, padding: int = 0) -> bytes:
    """What a name server says: one A record, and *padding* bytes of TXT."""
    records = [b"\xc0\x0c" + struct.pack("!HHIH", A, 1, 60, 4) + socket.inet_aton(address)] if not rcode else []
    while padding > 0:
        chunk = min(padding, 200)
        records.append(b"\xc0\x0c" + struct.pack("!HHIHB", TXT, 1, 60, chunk + 1, chunk) + b"x" * chunk)
        padding -= chunk
    header = query[:2] + struct.pack("!HHHHH", 0x8180 | flags | rcode, 1, len(records), 0, 0)
    return header + section(query) + b"".join(records)


def address_in(message: bytes) -> str:
    """The A record of an answer by `answer`."""
    start = 12 + len(section(message)) + 12
    return socket.inet_ntoa(message[start : start + 4])


def rcode(message: bytes) -> int:
    return message[3] & 0x0F


class NameServer(asyncio.DatagramProtocol):
    """A name server on a loopback address, over UDP and, unless told otherwise, TCP. *respond* may return several."""

    def __init__(self, respond: Callable[[bytes], list[bytes]] | None = None, *, tcp: bool = True) -> None:
        self.respond = respond or (lambda query: [answer(query)])
        self.asked: list[tuple[str, bytes]] = []
        self.sources: list[int] = []
        self._tcp = tcp
        self.arrived = asyncio.Event()

    async def start(self, address: str = "127.0.0.1") -> "NameServer":
        loop = asyncio.get_running_loop()
        udp, tcp = _two_on_one_port(address)
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=udp)
        self.port = int(udp.getsockname()[1])
        self.text = f"{address}:{self.port}"
        if self._tcp:
            self._server = await asyncio.start_server(self._serve, sock=tcp)
        else:
            tcp.close()
        return self

    async def stop(self) -> None:
        self._transport.close()
        if self._tcp:
            self._server.close()
        await asyncio.sleep(0)  # transports close in the next pass of the loop

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        self.asked.append(("udp", data))
        self.sources.append(source[1])
        self.arrived.set()
        for reply in self.respond(data):
            self._transport.sendto(reply, source)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            data = await reader.readexactly(length)
            self.asked.append(("tcp", data))
            for reply in self.respond(data):
                writer.write(struct.pack("!H", len(reply)) + reply)
            await writer.drain()
        writer.close()


def _two_on_one_port(address: str) -> tuple[socket.socket, socket.socket]:
    while True:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((address, 0))
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            tcp.bind(udp.getsockname())
        except OSError:  # taken over TCP: try another port
            udp.close()
            tcp.close()
        else:
            return udp, tcp


class Asker(asyncio.DatagramProtocol):
    """A guest's resolver."""

    def __init__(self, forwarder: tuple[str, int], source: str = "127.0.0.1") -> None:
        self._forwarder = forwarder
        self._source = source
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def open(self) -> "Asker":
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=(self._source, 0), remote_addr=self._forwarder
        )
        return self

    async def close(self) -> None:
        self._transport.close()
        await asyncio.sleep(0)

    def send(self, data: bytes) -> None:
        self._transport.sendto(data)

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        self.answers.put_nowait(data)

    async def ask(self, data: bytes) -> bytes:
        self.send(data)
        async with asyncio.timeout(10):
            return await self.answers.get()

    async def ask_tcp(self, *questions: bytes) -> list[bytes]:
        """The answers over one connection; fewer than questions if the other side closes it."""
        answers = []
        reader, writer = await asyncio.open_connection(*self._forwarder, local_addr=(self._source, 0))
        try:
            async with asyncio.timeout(10):
                for data in questions:
                    writer.write(struct.pack("!H", len(data)) + data)
                    (length,) = struct.unpack("!H", await reader.readexactly(2))
                    answers.append(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
        return answers
