"""The server of an SDK suite. Not of the session: suites share a home, so each lets go of it before the next begins."""

from collections.abc import Iterator

import pytest

from tests.running import running_server
from tests.server import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A running server with the template `base`; nothing may be left of it at the end."""
    with running_server() as running, running.sdk():
        yield running
