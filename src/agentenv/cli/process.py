"""`aenv exec` and `aenv shell`: a command in a sandbox, joined to this terminal.

Output is written as bytes as it comes. Input and signals go by calls of their own,
from a thread, since the stream of output is busy.
"""

import base64
import fcntl
import os
import re
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, BinaryIO, Final

from agentenv.cli.client import USAGE, CliError, SandboxClient

INPUT_CHUNK_BYTES = 32 << 10
# What agents call signals 1 to 31; any of them may also come as "signal N".
SIGNAL_TEXTS: Final = (
    "hangup", "interrupt", "quit", "illegal instruction", "trace/breakpoint trap", "aborted", "bus error",
    "floating point exception", "killed", "user defined signal 1", "segmentation fault", "user defined signal 2",
    "broken pipe", "alarm clock", "terminated", "stack fault", "child exited", "continued", "stopped (signal)",
    "stopped", "stopped (tty input)", "stopped (tty output)", "urgent I/O condition", "CPU time limit exceeded",
    "file size limit exceeded", "virtual timer expired", "profiling timer expired", "window changed", "I/O possible",
    "power failure", "bad system call",
)  # fmt: skip
SIGNALS: Final = {text: number for number, text in enumerate(SIGNAL_TEXTS, start=1)}
REMARKS: Final = (" (core dumped)", " (out of memory)")  # after the name of a signal, any of them
START, INPUT, CLOSE = "process.Process/Start", "process.Process/SendInput", "process.Process/CloseStdin"
ENDING: Final = (signal.SIGTERM, signal.SIGHUP)  # after either, the command is asked to end and we do not wait for it
SIGNAL, UPDATE = "process.Process/SendSignal", "process.Process/Update"


def execute(
    sandbox: SandboxClient,
    command: list[str],
    *,
    user: str | None = None,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    with_input: bool = False,
) -> int:
    """Run *command* to its end and return its exit code; 128 + N for one ended by signal N."""
    request: dict[str, Any] = {"process": _process(command, cwd, env), "stdin": with_input}
    interrupts = _Interrupts(sandbox)
    try:
        with _handled(interrupts):
            return _run(sandbox, request, user, interrupts)
    except BrokenPipeError:
        # Nobody reads the output any more. On this machine the command would be ended by its next write.
        if interrupts.pid is not None:
            sandbox.unary(SIGNAL, {"process": {"pid": interrupts.pid}, "signal": "SIGNAL_SIGTERM"})
        raise
    except _EndedError as ended:
        _ask_to_end(sandbox, interrupts.pid, "SIGNAL_SIGTERM")
        return 128 + ended.number


def _ask_to_end(sandbox: SandboxClient, pid: int | None, name: str) -> None:
    if pid is not None:
        with suppress(CliError):  # it may have ended meanwhile
            sandbox.unary(SIGNAL, {"process": {"pid": pid}, "signal": name})


def _run(sandbox: SandboxClient, request: dict[str, Any], user: str | None, interrupts: "_Interrupts") -> int:
    with_input = request["stdin"]
    for frame in sandbox.stream(START, request, user=user):
        event = frame.message.get("event", {})
        if "start" in event:
            interrupts.pid = pid = int(event["start"]["pid"])
            if with_input:
                _in_thread(partial(_send_input, sandbox, pid, sys.stdin.buffer))
        for name, data in event.get("data", {}).items():
            _write(sys.stderr.buffer if name == "stderr" else sys.stdout.buffer, base64.b64decode(data))
        if "end" in event:
            return exit_code(event["end"])
    raise CliError("the sandbox did not say how the command ended")


@contextmanager
def _handled(interrupts: "_Interrupts") -> Iterator[None]:
    """Ctrl-C goes to the command; a signal to end comes as `_EndedError`."""
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        with _ending():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ending() -> Iterator[None]:
    """A signal to end comes as `_EndedError`, unless it is ignored, as under nohup."""
    handlers: dict[signal.Signals, Any] = {one: _end for one in ENDING if signal.getsignal(one) is not signal.SIG_IGN}
    before = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _EndedError(BaseException):
    """A signal told us to end. Not an `Exception`, so that nothing on the way takes it for a failure of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _frame: FrameType | None) -> None:
    raise _EndedError(number)


@dataclass(slots=True)
class _Interrupts:
    """What Ctrl-C does: the command is asked once, so that it may clean up, and the second time it must go."""

    sandbox: SandboxClient
    pid: int | None = None
    asked: bool = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pid is None:
            raise KeyboardInterrupt
        name = "SIGNAL_SIGKILL" if self.asked else "SIGNAL_SIGTERM"
        self.asked = True
        _in_thread(partial(self.sandbox.unary, SIGNAL, {"process": {"pid": self.pid}, "signal": name}))


def attach_shell(sandbox: SandboxClient, *, user: str | None, shell: str) -> int:
    """An interactive shell on a terminal of its own in the sandbox."""
    if not sys.stdin.isatty():
        raise CliError("a shell needs a terminal", hint="use `aenv exec` in scripts", code=USAGE)
    request = {
        "process": _process([shell, "-i", "-l"], None, {"TERM": os.environ.get("TERM", "xterm-256color")}),
        "pty": {"size": _size()},
    }
    shell_of = _Shell()
    with _raw_terminal():
        try:
            with _ending():
                return _attached(sandbox, request, user, shell_of)
        except _EndedError as ended:
            # An interactive shell does not heed SIGTERM, and without its terminal it is of no use to anybody.
            _ask_to_end(sandbox, shell_of.pid, "SIGNAL_SIGKILL")
            return 128 + ended.number


@dataclass(slots=True)
class _Shell:
    pid: int | None = None


def _attached(sandbox: SandboxClient, request: dict[str, Any], user: str | None, shell: _Shell) -> int:
    done = threading.Event()
    for frame in sandbox.stream(START, request, user=user):
        event = frame.message.get("event", {})
        if "start" in event:
            shell.pid = pid = int(event["start"]["pid"])
            resize = partial(_in_thread, partial(_resize, sandbox, pid))
            signal.signal(signal.SIGWINCH, lambda _signal, _frame, resize=resize: resize())  # type: ignore[misc]
            _in_thread(partial(_send_keys, sandbox, pid, done))
        for data in event.get("data", {}).values():
            _write(sys.stdout.buffer, base64.b64decode(data))
        if "end" in event:
            done.set()
            return exit_code(event["end"])
    raise CliError("the sandbox did not say how the shell ended")


def _process(command: list[str], cwd: str | None, env: dict[str, str] | None) -> dict[str, Any]:
    process: dict[str, Any] = {"cmd": command[0], "args": command[1:]}
    if env:
        process["envs"] = env
    if cwd:
        process["cwd"] = cwd
    return process


def _send_input(sandbox: SandboxClient, pid: int, source: BinaryIO) -> None:
    descriptor = source.fileno()
    while data := os.read(descriptor, INPUT_CHUNK_BYTES):
        sandbox.unary(INPUT, {"process": {"pid": pid}, "input": {"stdin": base64.b64encode(data).decode()}})
    sandbox.unary(CLOSE, {"process": {"pid": pid}})


def _send_keys(sandbox: SandboxClient, pid: int, done: threading.Event) -> None:
    descriptor = sys.stdin.fileno()
    while not done.is_set():
        ready, _, _ = select.select([descriptor], [], [], 0.5)
        if not ready:
            continue
        if not (data := os.read(descriptor, INPUT_CHUNK_BYTES)):
            return
        sandbox.unary(INPUT, {"process": {"pid": pid}, "input": {"pty": base64.b64encode(data).decode()}})


def _resize(sandbox: SandboxClient, pid: int) -> None:
    sandbox.unary(UPDATE, {"process": {"pid": pid}, "pty": {"size": _size()}})


def _size() -> dict[str, int]:
    columns, rows = shutil.get_terminal_size()
    return {"cols": columns, "rows": rows}


@contextmanager
def _raw_terminal() -> Iterator[None]:
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor, termios.TCSADRAIN)  # what was typed ahead is for the shell
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _write(stream: BinaryIO, data: bytes) -> None:
    """Write all of *data*, also where somebody has made the terminal non-blocking."""
    flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
    if flags & os.O_NONBLOCK:
        fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    stream.write(data)
    stream.flush()


def exit_code(end: dict[str, Any]) -> int:
    """What a shell would report for the *end* event of a process: its code, or 128 + N if signal N ended it.

    128 where the agent names no signal that we know.
    """
    if end.get("exited", False):
        return int(end.get("exitCode", 0))
    text = str(end.get("status") or end.get("error") or "").removeprefix("signal: ")
    for remark in (*REMARKS, *REMARKS):  # both may be there, in either order
        text = text.removesuffix(remark)
    if text in SIGNALS:
        return 128 + SIGNALS[text]
    match = re.fullmatch(r"signal ([0-9]{1,2})", text)
    return 128 + int(match[1]) if match else 128


def _in_thread(work: Callable[[], Any]) -> None:
    """Do *work* beside the output; a process that has ended meanwhile is no error of ours."""

    def run() -> None:
        try:
            work()
        except (CliError, RuntimeError):  # httpx raises the latter once the client is closed, since we are leaving
            return

    threading.Thread(target=run, daemon=True).start()
