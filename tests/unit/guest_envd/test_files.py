"""/files: whole files over plain HTTP."""

import base64
import gzip
import hashlib
import os
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.unit.guest_envd.agent import Agent, Answer, running, wait_until
from tests.unit.guest_envd.conftest import USER_ID, Box, accounts, unshared

pytestmark = pytest.mark.needs("root", "mount", "envd")

RAW = {"Content-Type": "application/octet-stream"}


def url(path: str | Path, **query: str) -> str:
    return "/files?" + urllib.parse.urlencode({"path": str(path), **query})


def form(*parts: tuple[str, str, bytes], boundary: str = "BoundarY") -> tuple[bytes, dict[str, str]]:
    body = b""
    for name, filename, content in parts:
        disposition = f'Content-Disposition: form-data; name="{name}"; filename="{filename}"'
        head = "\r\n".join([f"--{boundary}", disposition, "Content-Type: text/plain", "", ""])
        body += head.encode() + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def put(
    agent: Agent, path: str | Path, content: bytes, headers: Mapping[str, str] | None = None, **query: str
) -> Answer:
    return agent.request("POST", url(path, **query), content, {**RAW, **(headers or {})})


def error(answer: Answer) -> tuple[int, int]:
    body = answer.json()
    assert body["message"]
    return answer.status, body["code"]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1 << 20, 5_000_001])
def test_what_was_written_is_read(box: Box, size: int) -> None:
    content = os.urandom(size)
    answer = put(box.agent, "data", content)
    assert (answer.status, answer.json()) == (200, [{"path": f"{box.home}/data", "name": "data", "type": "file"}])
    read = box.agent.request("GET", url("data"))
    assert (read.status, read.headers["content-length"]) == (200, str(size))
    assert read.body == content
    assert (box.home / "data").read_bytes() == content


def test_a_file_belongs_to_its_user_and_so_do_missing_parents(box: Box) -> None:
    assert put(box.agent, "a/b/c.txt", b"x").status == 200
    for path in (box.home / "a", box.home / "a/b", box.home / "a/b/c.txt"):
        assert (path.stat().st_uid, path.stat().st_gid) == (USER_ID, USER_ID)
    assert (box.home / "a").stat().st_mode & 0o777 == 0o755
    assert (box.home / "a/b/c.txt").stat().st_mode & 0o777 == 0o644


def test_an_overwrite_truncates_and_keeps_the_mode(box: Box) -> None:
    put(box.agent, "x", b"a long content")
    (box.home / "x").chmod(0o755)
    put(box.agent, "x", b"short")
    assert (box.home / "x").read_bytes() == b"short"
    assert (box.home / "x").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("path", "resolved"), [("~/f", "{home}/f"), ("f", "{home}/f"), ("d/../f", "{home}/f"), ("{home}/./f", "{home}/f")]
)
def test_paths_start_at_the_home_of_the_user(box: Box, path: str, resolved: str) -> None:
    answer = put(box.agent, path.format(home=box.home), b"x")
    assert answer.json()[0]["path"] == resolved.format(home=box.home)


def test_the_kernel_decides_what_a_user_may_do(box: Box) -> None:
    secret = box.home / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    (box.home / "link").symlink_to(secret)
    for path in ("secret", "link"):
        assert error(box.agent.request("GET", url(path))) == (403, 403)
        assert error(put(box.agent, path, b"x")) == (403, 403)
    assert error(put(box.agent, "/root/envd-test", b"x")) == (403, 403)
    assert error(put(box.agent, "/proc/version", b"x")) == (403, 403)
    assert box.agent.request("GET", url(secret, username="root")).body == b"root's"
    assert secret.read_text() == "root's"


def test_what_is_no_file_is_refused(box: Box) -> None:
    agent = box.agent
    os.mkfifo(box.home / "pipe")
    (box.home / "pipe").chmod(0o666)
    (box.home / "directory").mkdir()
    for path in ("pipe", "/dev/null", "directory", ""):
        assert error(agent.request("GET", url(path))) == (400, 400), path
        assert error(put(agent, path, b"x")) == (400, 400), path
    assert error(agent.request("GET", url("missing"))) == (404, 404)
    assert error(agent.request("GET", url("/etc/passwd/x")))[0] in (400, 404)
    assert error(put(agent, "/etc/passwd/x", b"x")) == (400, 400)
    assert error(put(agent, "a\0b", b"x")) == (400, 400)
    assert error(put(agent, "n" * 300, b"x")) == (400, 400)
    assert error(agent.request("POST", "/files", b"x", RAW)) == (400, 400)


def test_an_unknown_user_is_refused(agent: Agent) -> None:
    assert error(agent.request("GET", url("x", username="nobody-here"))) == (401, 401)
    assert error(put(agent, "x", b"", username="nobody-here")) == (401, 401)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/json", "multipart/mixed; boundary=x", "multipart/form-data"]
)
def test_other_kinds_of_body_are_refused(agent: Agent, kind: str) -> None:
    assert error(agent.request("POST", url("x"), b"x", {"Content-Type": kind})) == (400, 400)


def test_a_file_without_a_size_is_sent_whole(agent: Agent) -> None:
    assert b"Name:" in agent.request("GET", url("/proc/self/status")).body
    long = agent.request("GET", url("/proc/kallsyms", username="root"))
    assert long.status == 200
    assert long.body.endswith(b"\n")
    assert len(long.body) > 200_000


@pytest.mark.parametrize(
    ("asked", "status", "part", "said"),
    [
        ("bytes=0-4", 206, slice(0, 5), "bytes 0-4/100000"),
        ("bytes=99990-", 206, slice(99990, None), "bytes 99990-99999/100000"),
        ("bytes=-5", 206, slice(-5, None), "bytes 99995-99999/100000"),
        ("bytes=10-200000", 206, slice(10, None), "bytes 10-99999/100000"),
        ("bytes=0-1,5-6", 200, slice(None), None),
        ("bytes=100000-", 416, None, "bytes */100000"),
    ],
)
def test_a_part_of_a_file(box: Box, asked: str, status: int, part: slice | None, said: str | None) -> None:
    content = os.urandom(100_000)
    (box.home / "big").write_bytes(content)
    answer = box.agent.request("GET", url("big"), headers={"Range": asked})
    assert (answer.status, answer.headers.get("content-range")) == (status, said)
    if part is not None:
        assert answer.body == content[part]
        assert answer.headers["content-length"] == str(len(answer.body))


def test_the_head_of_a_file(box: Box) -> None:
    (box.home / "x").write_bytes(bytes(70_000))
    answer = box.agent.request("HEAD", url("x"))
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "70000", b"")


def test_a_form_has_full_paths_as_file_names(box: Box) -> None:
    body, headers = form(
        ("file", f"{box.home}/one.txt", b"1\r\n--Boundar\r\n"),
        ("other", "ignored", b"?"),
        ("file", "sub/zwei ü%22.txt", b""),
    )
    answer = box.agent.request("POST", "/files", body, headers)
    assert [(w["path"], w["name"]) for w in answer.json()] == [
        (f"{box.home}/one.txt", "one.txt"),
        (f'{box.home}/sub/zwei ü".txt', 'zwei ü".txt'),
    ]
    assert (box.home / "one.txt").read_bytes() == b"1\r\n--Boundar\r\n"
    assert (box.home / 'sub/zwei ü".txt').read_bytes() == b""


def test_the_path_in_the_query_is_for_one_part(box: Box) -> None:
    body, headers = form(("file", "whatever", b"content"))
    assert box.agent.request("POST", url("target"), body, headers).json()[0]["name"] == "target"
    body, headers = form(("file", "a", b"1"), ("file", "b", b"2"))
    assert error(box.agent.request("POST", url("target"), body, headers)) == (400, 400)


@pytest.mark.parametrize("parts", [[("other", "x", b"")], [("file", "", b"x")], []])
def test_a_form_without_a_file_is_refused(agent: Agent, parts: list[tuple[str, str, bytes]]) -> None:
    body, headers = form(*parts)
    assert error(agent.request("POST", "/files", body, headers)) == (400, 400)


def test_a_form_that_is_cut_off_is_refused_and_leaves_nothing_new(box: Box) -> None:
    body, headers = form(("file", "new", bytes(100_000)))
    assert error(box.agent.request("POST", "/files", body[:-20], headers)) == (400, 400)
    wait_until(lambda: not (box.home / "new").exists())


def test_a_chunked_body_is_taken(box: Box) -> None:
    chunks = [os.urandom(70_000) for _ in range(20)]

    def body() -> Iterator[bytes]:
        yield from chunks

    connection = box.agent.connection()
    connection.request("POST", url("x"), body(), RAW, encode_chunked=True)
    assert connection.getresponse().read().startswith(b"[{")
    connection.close()
    assert (box.home / "x").read_bytes() == b"".join(chunks)


def test_a_compressed_body_is_stored_plain(box: Box) -> None:
    content = bytes(3_000_000) + os.urandom(1000)
    two = gzip.compress(content[:1000]) + gzip.compress(content[1000:])
    assert put(box.agent, "x", two, {"Content-Encoding": "gzip"}).status == 200
    assert (box.home / "x").read_bytes() == content
    body, headers = form(("file", "y", content))
    assert (
        box.agent.request("POST", "/files", gzip.compress(body), {**headers, "Content-Encoding": "gzip"}).status == 200
    )
    assert (box.home / "y").read_bytes() == content


@pytest.mark.parametrize("body", [b"not gzip at all", gzip.compress(os.urandom(50_000))[:-20], b""])
def test_a_compressed_body_that_is_broken_is_refused(box: Box, body: bytes) -> None:
    assert error(put(box.agent, "x", body, {"Content-Encoding": "gzip"})) == (400, 400)
    wait_until(lambda: not (box.home / "x").exists())


def test_an_encoding_that_is_not_known_is_refused(agent: Agent) -> None:
    assert error(put(agent, "x", b"x", {"Content-Encoding": "br"})) == (415, 415)


def test_metadata_is_kept_with_the_file_and_replaced_as_a_whole(box: Box) -> None:
    first = put(box.agent, "x", b"1", {"X-Metadata-Author": "me", "X-Metadata-Kind": "ü".encode().decode("latin-1")})
    assert first.json()[0]["metadata"] == {"author": "me", "kind": "ü"}
    assert os.getxattr(box.home / "x", "user.e2b.author") == b"me"
    entry = box.agent.call("filesystem.Filesystem/Stat", {"path": "x"})["entry"]
    assert entry["metadata"] == {"author": "me", "kind": "ü"}
    os.setxattr(box.home / "x", "user.other", b"stays")
    assert "metadata" not in put(box.agent, "x", b"2").json()[0]
    assert os.listxattr(box.home / "x") == ["user.other"]


def test_a_client_that_breaks_off_leaves_nothing_new(box: Box) -> None:
    with socket.create_connection(("127.0.0.1", box.agent.port)) as raw:
        lines = [
            f"POST {url('partial')} HTTP/1.1",
            "Host: x",
            f"Content-Type: {RAW['Content-Type']}",
            "Content-Length: 1000000",
        ]
        raw.sendall("\r\n".join([*lines, "", ""]).encode() + bytes(300_000))
        wait_until(lambda: (box.home / "partial").exists() and (box.home / "partial").stat().st_size > 100_000)
    wait_until(lambda: not (box.home / "partial").exists())


def test_a_file_that_becomes_shorter_breaks_the_connection(box: Box) -> None:
    (box.home / "x").write_bytes(bytes(50_000_000))
    connection = box.agent.connection()
    connection.request("GET", url("x"))
    response = connection.getresponse()
    os.truncate(box.home / "x", 1000)
    received = 0
    while chunk := response.read(1 << 20):
        received += len(chunk)
    connection.close()
    assert response.getheader("content-length") == "50000000"
    assert 0 < received < 50_000_000


def test_a_full_disk_is_told_as_such(envd_binary: Path, module_dir: Path) -> None:
    accounts(module_dir / "etc-full", module_dir)
    command = unshared(envd_binary, module_dir / "etc-full", "--no-cgroup")
    command[-1] = "mount -t tmpfs -o size=1m tmpfs /mnt; chmod 777 /mnt; " + command[-1]
    with running(command) as agent:
        agent.init(defaultUser="user")
        assert error(put(agent, "/mnt/big", bytes(3 << 20))) == (507, 507)
        wait_until(lambda: agent.request("GET", url("/mnt/big")).status == 404)
        assert put(agent, "/mnt/small", bytes(1000)).status == 200


@pytest.mark.slow
def test_memory_does_not_grow_with_the_size_of_a_file(box: Box) -> None:
    size = 400 << 20
    subprocess.run(["fallocate", "-l", str(size), box.home / "huge"], check=True)
    put(box.agent, "warm", bytes(1 << 20))
    before = box.agent.rss_kib()
    connection = box.agent.connection()
    connection.request("GET", url("huge"))
    response = connection.getresponse()
    digest, total, peak = hashlib.sha256(), 0, 0
    while chunk := response.read(8 << 20):
        total += len(chunk)
        peak = max(peak, box.agent.rss_kib())
        digest.update(chunk[:64])
    connection.close()
    assert total == size
    assert peak - before < 3000

    def zeros() -> Iterator[bytes]:
        for _ in range(200):
            yield bytes(1 << 20)

    connection = box.agent.connection()
    connection.request("POST", url("sent"), zeros(), RAW, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    assert (box.home / "sent").stat().st_size == 200 << 20
    assert box.agent.rss_kib() - before < 3000


class TestSignatures:
    """A signed URL stands in for the token."""

    @pytest.fixture
    def box(self, box: Box) -> Iterator[Box]:
        box.agent.init(accessToken="tok")
        (box.home / "a b").write_text("content")
        shutil.chown(box.home / "a b", USER_ID)
        yield box
        box.agent.init(accessToken=None)

    @staticmethod
    def sign(path: str, operation: str, username: str = "", token: str = "tok", expiration: str | None = None) -> str:
        raw = ":".join([path, operation, username, token, *([expiration] if expiration is not None else [])])
        return "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")

    def test_the_token_is_needed_and_must_match(self, box: Box) -> None:
        path = url("a b")
        assert error(box.agent.request("GET", path)) == (401, 401)
        assert error(box.agent.request("GET", path, headers={"X-Access-Token": "Tok"})) == (401, 401)
        assert box.agent.request("GET", path, headers={"X-Access-Token": "tok"}).body == b"content"

    def test_a_signature_reads_or_writes_what_it_was_made_for(self, box: Box) -> None:
        read = self.sign("a b", "read")
        assert box.agent.request("GET", url("a b", signature=read)).body == b"content"
        assert error(box.agent.request("GET", url("~/a b", signature=read))) == (401, 401)
        assert error(put(box.agent, "a b", b"new", signature=read)) == (401, 401)
        assert put(box.agent, "a b", b"new", signature=self.sign("a b", "write")).status == 200
        as_root = url("a b", signature=self.sign(str(box.home / "a b"), "read", "root"), username="root")
        assert error(box.agent.request("GET", as_root)) == (401, 401)
        full = str(box.home / "a b")
        signed = url(full, signature=self.sign(full, "read", "root"), username="root")
        assert box.agent.request("GET", signed).body == b"new"

    def test_a_signature_expires(self, box: Box) -> None:
        for at, status in (("4000000000", 200), ("1700000000", 401), ("", 401), ("never", 401)):
            signed = url("a b", signature=self.sign("a b", "read", expiration=at), signature_expiration=at)
            assert box.agent.request("GET", signed).status == status
        later = url(
            "a b", signature=self.sign("a b", "read", expiration="4000000000"), signature_expiration="4000000001"
        )
        assert error(box.agent.request("GET", later)) == (401, 401)

    def test_a_wrong_token_is_not_made_good_by_a_signature(self, box: Box) -> None:
        signed = url("a b", signature=self.sign("a b", "read"))
        assert error(box.agent.request("GET", signed, headers={"X-Access-Token": "no"})) == (401, 401)
