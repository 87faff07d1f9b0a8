"""The speed of the time stamp counter."""

import platform

import pytest

from agentenv.model.errors import Unsupported
from agentenv.vmm.tsc import tsc_khz


def test_two_measurements_agree_to_a_part_in_a_thousand() -> None:
    first, second = (tsc_khz.__wrapped__() for _ in range(2))

    assert abs(first - second) < first / 1000


def test_another_architecture_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    with pytest.raises(Unsupported, match="aarch64"):
        tsc_khz.__wrapped__()
