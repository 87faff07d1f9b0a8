"""What this release lacks says so, to whoever has the key."""

import httpx
import pytest

from agentenv.api.later import ROUTES
from tests.unit.api.client import refused


@pytest.mark.parametrize(("method", "path", "what"), ROUTES)
async def test_an_absent_route_is_a_typed_501(api: httpx.AsyncClient, method: str, path: str, what: str) -> None:
    answer = await api.request(method, path.replace("{", "").replace("}", ""))

    assert refused(answer, 501, "unsupported").startswith(what)
    assert "should-retry" not in answer.headers
