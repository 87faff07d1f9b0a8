"""What a person reads when something is wrong: no traceback, one reason, one hint."""

import http.server
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.cli.world import NOBODY, WAIT_S, Terminal, World


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that says one thing to everybody."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class calls it so
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        ({"message": "no disk"}, "error: no disk (507)", None),
        ({"message": "no disk; free some", "hint": "free some"}, "error: no disk (507)", "hint: free some"),
        ({"message": "no disk", "hint": "free some"}, "error: no disk (507)", "hint: free some"),
        ({"message": "no disk; free some"}, "error: no disk; free some (507)", None),
        ({"message": "no disk", "hint": None}, "error: no disk (507)", None),
        ({"message": "odd [/red] [bold]"}, "error: odd [/red] [bold] (507)", None),
        ({"message": "esc \x1b[2J"}, "error: esc \N{REPLACEMENT CHARACTER}[2J (507)", None),
    ],
)
def test_a_hint_is_shown_once_wherever_the_server_puts_it(
    aenv: Terminal, error: dict[str, object], message: str, hint: str | None
) -> None:
    with answering(507, json.dumps({"code": 507, **error}).encode()) as url:
        run = aenv("--url", url, "ls")

    assert run.code == 1
    assert run.err.splitlines() == [message, *([hint] if hint else [])]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"x"', b"{}", b"\xff\xfe"])
def test_an_error_of_something_else_is_still_an_error(aenv: Terminal, body: bytes) -> None:
    with answering(502, body) as url:
        run = aenv("--url", url, "ls")

    assert run.code == 1
    assert "(502)" in run.err


def test_a_server_that_is_not_ours(aenv: Terminal) -> None:
    with answering(200, b"<html>welcome</html>") as url:
        run = aenv("--url", url, "ls")

    assert run.code == 1
    assert "is not AgentENV" in run.err


def test_a_wrong_key(aenv: Terminal) -> None:
    run = aenv("--api-key", "e2b_" + "0" * 40, "ls")

    assert run.code == 1
    assert "(401)" in run.err
    assert "AENV_API_KEY" in run.err
    assert aenv("--api-key", "käse", "ls").code == 2


def test_no_server(aenv: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    run = aenv("--url", f"http://127.0.0.1:{port}", "ls")

    assert run.code == 1
    assert f"no server answers at http://127.0.0.1:{port}" in run.err
    assert "aenv server" in run.err


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp://x", "http://127.0.0.1:99999"])
def test_a_url_that_is_none(aenv: Terminal, url: str) -> None:
    run = aenv("--url", url, "ls")

    assert run.code == 1
    assert run.err.startswith("error:")


def test_no_key_file(aenv: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AENV_API_KEY")
    monkeypatch.setenv("AENV_HOME_PATH", str(tmp_path / "home"))

    run = aenv("ls")

    assert run.code == 1
    assert "no API key" in run.err
    assert str(tmp_path / "home/secrets/api-key") in run.err
    assert "AENV_HOME_PATH" in run.err  # the name that the guides use


@pytest.mark.parametrize("name", ["AENV_HOME_PATH", "AENV_PATHS_HOME"])
def test_the_key_file_of_a_server_on_this_machine(
    world: World, aenv: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/api-key").write_text(os.environ["AENV_API_KEY"] + "\n")
    monkeypatch.delenv("AENV_API_KEY")
    monkeypatch.setenv(name, str(tmp_path))

    assert aenv("ls").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 300])  # less and more than a pipe holds
def test_a_reader_that_has_seen_enough(world: World, aenv: Terminal, count: int) -> None:
    for _ in range(count):
        world.node.add_sandbox()
    ours, theirs = os.pipe()
    os.close(ours)

    done = subprocess.run(
        aenv.command("ls"), env=aenv.environment, stdout=theirs, stderr=subprocess.PIPE, timeout=WAIT_S, check=False
    )

    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_completion_is_shown(aenv: Terminal) -> None:
    run = aenv.process("--show-completion", "bash", environment={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})

    assert run.code == 0
    assert "_AENV_COMPLETE=complete_bash" in run.out


@pytest.mark.slow
def test_ids_are_completed(world: World, aenv: Terminal) -> None:
    sandbox = world.node.add_sandbox()
    typed = {"_AENV_COMPLETE": "complete_bash", "COMP_WORDS": f"aenv pause {sandbox.id[:4]}", "COMP_CWORD": "2"}

    assert sandbox.id in aenv.process(environment=typed).out.split()
    silent = aenv.process(environment=typed | {"AENV_API_URL": "http://127.0.0.1:1"})
    assert (silent.out.split(), silent.err) == ([], "")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["start", "template delete"])
def test_templates_are_completed(world: World, aenv: Terminal, words: str) -> None:
    world.node.add_template("other")
    position = str(len(words.split()) + 1)
    typed = {"_AENV_COMPLETE": "complete_bash", "COMP_WORDS": f"aenv {words} ot", "COMP_CWORD": position}

    assert [one.split(":")[0] for one in aenv.process(environment=typed).out.split()] == ["other"]


def test_unknown_sandbox(aenv: Terminal) -> None:
    for command in ("pause", "resume", "fork", "logs", "info", "snapshot"):
        run = aenv(command, NOBODY)
        assert (run.code, run.out) == (1, "")
        assert "(404)" in run.err
