"""Settings that cannot be right do not get as far as a server."""

import pytest

from agentenv.api.settings import ApiSettings
from agentenv.model.errors import Invalid
from tests.unit.api.client import KEY


@pytest.mark.parametrize("key", ["", "short", "x" * 31, "x" * 257, "e2b_" + " " * 40, "x" * 32 + "\n", "é" * 40])
def test_a_weak_or_unsendable_key_is_refused(key: str) -> None:
    with pytest.raises(Invalid) as refusal:
        ApiSettings(api_key=key)

    assert not key or key not in refusal.value.message


@pytest.mark.parametrize("limits", [{"max_body_bytes": 0}, {"body_timeout_s": 0}, {"body_timeout_s": -1.0}])
def test_a_limit_that_lets_nothing_through_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        ApiSettings(api_key=KEY, **limits)  # type: ignore[arg-type]
