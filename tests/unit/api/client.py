"""How tests talk to an app, and what they say about every refusal."""

from typing import Any

import httpx
from fastapi import FastAPI

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
NOBODY = "6e0e5a52-0000-4000-8000-000000000000"  # an id that no sandbox has


def connect(app: FastAPI, *, key: str | None = KEY) -> httpx.AsyncClient:
    headers = {} if key is None else {"X-API-Key": key}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test", headers=headers)


def refused(answer: httpx.Response, status: int, error_code: str) -> str:
    """The message of a refusal, once it is known to be in the envelope."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    told: dict[str, Any] = answer.json()
    assert set(told) - {"hint"} == {"code", "message", "error_code"}
    assert isinstance(told.get("hint", ""), str)
    assert told["code"] == status
    assert told["error_code"] == error_code
    assert isinstance(told["message"], str)
    return str(told["message"])
