"""Honest skips: a test is skipped only for want of a capability that it named and this machine lacks.

Such skips are counted and listed at the end. Any other skip is a failure, and so
is the lack of a capability listed in AENV_REQUIRE (comma-separated; CI sets it).
"""

import os
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from agentenv.guest.image import GuestImage, load_guest
from tests.capabilities import BASE_ROOTFS, GUEST_DIR, PROBES, find_envd, lack_of

# What a shell starts in the background ignores SIGINT, and under nohup SIGHUP; so would every program of a test.
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)

_LACKS = pytest.StashKey[list[str]]()
_TALLY = pytest.StashKey[Counter[str]]()


# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _logs_reach_pytest() -> None:
    """What the product logs is shown with a test that fails, and `caplog` has it."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, _as_record],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _as_record(_logger: object, _method: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    said, exception = str(event.pop("event")), event.pop("exc_info", None)
    event.pop("level", None)
    about = " ".join(f"{name}={value!r}" for name, value in event.items())
    return (f"{said} {about}".rstrip(),), {"exc_info": exception}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Counter()
    unknown = _required() - PROBES.keys()
    if unknown:
        raise pytest.UsageError(f"AENV_REQUIRE names unknown capabilities: {', '.join(sorted(unknown))}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    unknown = [name for name in needed if name not in PROBES]
    if unknown:
        pytest.fail(f"unknown capability: {', '.join(unknown)}", pytrace=False)
    lacks = [f"{name} ({why})" for name in dict.fromkeys(needed) if (why := lack_of(name))]
    if not lacks:
        return
    demanded = [name for name in needed if name in _required() and lack_of(name)]
    if demanded:
        pytest.fail(f"AENV_REQUIRE demands what is missing here: {'; '.join(lacks)}", pytrace=False)
    item.stash[_LACKS] = lacks
    item.config.stash[_TALLY].update(lacks)
    pytest.skip(f"needs {'; '.join(lacks)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _LACKS not in item.stash:
        report.outcome = "failed"
        report.longrepr = f"skipped though nothing it named is missing: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash[_TALLY]
    if not tally:
        return
    terminalreporter.section("skipped for want of")
    for lack, count in tally.most_common():
        terminalreporter.write_line(f"{count:5d}  {lack}")


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get("AENV_REQUIRE", "").split(",") if name.strip()}


@pytest.fixture(scope="session")
def envd_binary() -> Path:
    """The built agent. A test that uses it is marked ``needs("envd")``."""
    found = find_envd()
    assert found is not None, "mark the test with needs('envd')"
    return found


@pytest.fixture(scope="session")
def guest_image() -> GuestImage:
    """The built guest. A test that uses it is marked ``needs("guest")``."""
    return load_guest(GUEST_DIR)


@pytest.fixture(scope="session")
def base_rootfs() -> Path:
    """The archive of the default template's root. A test that uses it is marked ``needs("base")``."""
    return BASE_ROOTFS
