"""The API key and the token seed: found, or generated once and kept; and what is made from the seed.

A secret file is created whole or not at all, readable by its owner only, and never
through a symbolic link. A bad one is refused, not replaced: replacing a seed would
lock every client out of its running sandboxes.
"""

import errno
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentenv.aio.failures import FULL
from agentenv.config.schema import API_KEY_PATTERN, SEED_PATTERN, Settings
from agentenv.model.errors import Conflict, Invalid, NoSpace, Unavailable

RUN_SECRETS: Final = Path("/run/secrets")
_MAX_BYTES: Final = 4096
_API_KEY: Final = re.compile(API_KEY_PATTERN)
_SEED: Final = re.compile(SEED_PATTERN)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets of every sandbox, made from its id: the same ones each time, on every node with this seed."""

    seed: str = field(repr=False)

    def envd_token(self, sandbox_id: str) -> str:
        """For the agent's port of a secure sandbox."""
        return self._code(sandbox_id)

    def traffic_token(self, sandbox_id: str) -> str:
        """For the application ports of a sandbox without public traffic."""
        return self._code(f"sandbox-traffic-{sandbox_id}")

    def control_secret(self, sandbox_id: str) -> str:
        """For what only the node may ask of the agent."""
        return self._code(f"sandbox-control-{sandbox_id}")

    def _code(self, message: str) -> str:
        return hmac.new(self.seed.encode(), message.encode(), hashlib.sha256).hexdigest()


def load_api_key(settings: Settings, *, run_secrets: Path = RUN_SECRETS) -> str:
    """Return the API key; blocking. Generated and kept if there is none.

    Raises `Invalid` for a key or file that may not be used, `Unavailable` or `NoSpace` if a new one cannot be kept.
    """
    auth = settings.auth
    if auth.api_key is not None:
        return _checked(auth.api_key.get_secret_value(), _API_KEY, "auth.api_key")
    if auth.api_key_file is not None:
        return _read_mounted(auth.api_key_file, _API_KEY)
    if (mounted := run_secrets / "api-key").exists():
        return _read_mounted(mounted, _API_KEY)
    return _read_or_create(settings.paths.home, "api-key", _API_KEY, lambda: f"e2b_{secrets.token_hex(20)}")


def load_credentials(settings: Settings, *, in_use: bool = False) -> Credentials:
    """Return what makes tokens; blocking. The seed is generated and kept if there is none.

    With *in_use*, sandboxes exist whose tokens were made from a seed: a lost one is then not replaced.

    Raises `Conflict` for that, and otherwise like `load_api_key`.
    """
    auth = settings.auth
    if auth.token_seed is not None:
        return Credentials(_checked(auth.token_seed.get_secret_value(), _SEED, "auth.token_seed"))
    if auth.token_seed_file is not None:
        return Credentials(_read_mounted(auth.token_seed_file, _SEED))

    def generate() -> str:
        if in_use:
            raise Conflict(
                "the token seed is missing, and sandboxes exist whose tokens were made from it",
                hint=f"put {settings.paths.home}/secrets/token-seed back, or delete those sandboxes",
            )
        return secrets.token_hex(32)

    return Credentials(_read_or_create(settings.paths.home, "token-seed", _SEED, generate))


def _checked(secret: str, pattern: re.Pattern[str], origin: str) -> str:
    if not pattern.fullmatch(secret):
        raise Invalid(f"{origin} does not hold a usable secret", hint=f"it must match {pattern.pattern}")
    return secret


def _read_mounted(path: Path, pattern: re.Pattern[str]) -> str:
    """Read a secret that an operator or an orchestrator put there: it may be a link and have any mode."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Invalid(f"the secret in {path} cannot be read: {error.strerror}") from error
    return _content(path, descriptor, pattern)


def _read_own(path: Path, pattern: re.Pattern[str]) -> str | None:
    """Read a secret that a server of ours made; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise Invalid(f"{path} {what}") from error
    status = os.fstat(descriptor)
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise Invalid(f"{path} is open to others", hint=f"if the secret is still one: chmod 600 {path}, and own it")
    return _content(path, descriptor, pattern)


def _content(path: Path, descriptor: int, pattern: re.Pattern[str]) -> str:
    with open(descriptor, "rb") as opened:  # a descriptor, not a path
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Invalid(f"{path} is not a plain file")
        raw = opened.read(_MAX_BYTES)
    return _checked(raw.decode(errors="replace").rstrip("\r\n"), pattern, str(path))


def _read_or_create(home: Path, name: str, pattern: re.Pattern[str], generate: Callable[[], str]) -> str:
    path = _own_directory(home / "secrets") / name
    found = _read_own(path, pattern)
    if found is None:
        _create(path, generate())
        found = _read_own(path, pattern)  # of whoever came first
    if found is None:
        raise Unavailable(f"{path} disappeared while it was made")
    return found


def _own_directory(directory: Path) -> Path:
    try:
        directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError as error:
        raise _cannot(directory, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise Invalid(f"{directory} is not a directory")
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise Invalid(f"{directory} is open to others", hint=f"chmod 700 {directory}, and own it")
    return directory


def _create(path: Path, secret: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as opened:  # noqa: PTH123  # a descriptor, not a path
                opened.write(f"{secret}\n".encode())
                opened.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):  # another server of this home was quicker: its secret counts
                os.link(temporary, path)
        finally:
            temporary.unlink()
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise _cannot(path, error) from error


def _cannot(path: Path, error: OSError) -> Exception:
    if error.errno in FULL:
        return NoSpace(f"no room for {path}")
    return Unavailable(f"{path} cannot be made: {error.strerror}", hint="check owner and mode of the home directory")
