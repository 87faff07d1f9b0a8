"""HTTP and WebSocket on two ports, with the standard library only: what the demo reaches from outside."""

import base64
import hashlib
import http.server
import socketserver
import struct
import threading

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"hello from the sandbox, you asked for {self.path}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Echo(socketserver.StreamRequestHandler):
    """One WebSocket client: short text messages come back in capitals."""

    def handle(self) -> None:
        key = b""
        while (line := self.rfile.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"sec-websocket-key":
                key = value.strip()
        accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest())
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        while (head := self.rfile.read(2)) and len(head) == 2:
            opcode, length = head[0] & 0x0F, head[1] & 0x7F
            if length == 126:
                (length,) = struct.unpack(">H", self.rfile.read(2))
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(length)))
            if opcode == 8:
                self.wfile.write(bytes([0x88, len(data)]) + data)
                return
            self.wfile.write(bytes([0x81, len(data)]) + data.upper())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    websocket = Server(("0.0.0.0", 8001), Echo)
    threading.Thread(target=websocket.serve_forever, daemon=True).start()
    Server(("0.0.0.0", 8000), Hello).serve_forever()
