"""Who may pass is decided from the head alone, and the agent's control calls are on no list."""

import itertools
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.node.contract import Tokens
from agentenv.proxy.access import Credentials, agent_serves, credentials, may_pass, may_wake, without_token
from tests.unit.proxy.test_signature import sign

NOTHING = Credentials(None, None)
SERVED = [b"/health", b"/files", b"/metrics", b"/envs", b"/process.Process/Start", b"/filesystem.Filesystem/Stat"]
CONTROL = ["init", "freeze", "thaw", "shutdown", "sync", "agent"]


@pytest.mark.parametrize("path", SERVED)
def test_the_agent_serves_its_public_paths(path: bytes) -> None:
    assert agent_serves(path)


def spellings(name: str) -> list[str]:
    encoded = "".join(f"%{ord(letter):02x}" for letter in name)
    return [
        f"/{name}",
        f"//{name}",
        f"/./{name}",
        f"/x/../{name}",
        f"/health/../{name}",
        f"/{name}/",
        f"/{name}/.",
        f"/{name};x",
        f"/{name}%00",
        f"/{name}%20",
        f"/{name} ",
        f"/{name.upper()}",
        f"/{name.title()}",
        f"/{encoded}",
        f"/{encoded.upper()}",
        f"/%25{encoded[1:]}",
        f"/%2f{name}",
        f"/%2e/{name}",
        f"/process.Process/../{name}",
        f"/process.Process/%2e%2e/{name}",
        f"/process.Process/..%2f{name}",
        f"/health%2f..%2f{name}",
        f"/health\\..\\{name}",
        f"{name}",
        f"http://x/{name}",
    ]


@pytest.mark.parametrize("path", list(itertools.chain.from_iterable(map(spellings, CONTROL))))
def test_no_spelling_of_a_control_call_is_served(path: str) -> None:
    assert not agent_serves(path.encode())


@given(st.binary(max_size=80))
def test_what_is_served_is_spelled_exactly_so(path: bytes) -> None:
    if agent_serves(path):
        assert path in SERVED[:4] or path.split(b"/")[1] in (b"process.Process", b"filesystem.Filesystem")
        assert not {b"%", b"\\", b"?", b"\n"} & {path[at : at + 1] for at in range(len(path))}


@pytest.mark.parametrize("path", [b"/health\n", b"/process.Process/Start\n", b"/process.Process/", b"/x.X/Start", b""])
def test_near_misses_are_not_served(path: bytes) -> None:
    assert not agent_serves(path)


def test_a_public_sandbox_needs_nothing() -> None:
    assert may_pass(8080, None, NOTHING)


def test_a_private_sandbox_needs_its_token_on_every_port_but_the_agents() -> None:
    assert may_pass(49983, "secret", NOTHING)
    assert may_pass(8080, "secret", Credentials(b"secret", None))
    for shown in (NOTHING, Credentials(b"", None), Credentials(b"secre", None), Credentials(b"secrets", None)):
        assert not may_pass(8080, "secret", shown)
    assert not may_pass(8080, "secret", Credentials(None, b"secret"))


def test_a_token_given_twice_is_no_token() -> None:
    twice = [(b"e2b-traffic-access-token", b"secret")] * 2 + [(b"x-access-token", b"a"), (b"x-access-token", b"a")]
    assert credentials(twice, b"", upgrade=False) == NOTHING


def test_only_an_upgrade_may_carry_the_token_in_its_query() -> None:
    assert credentials([], b"a=b&traffic_access_token=t", upgrade=True) == Credentials(b"t", None)
    assert credentials([], b"a=b&traffic_access_token=t", upgrade=False) == NOTHING
    headers = [(b"e2b-traffic-access-token", b"t")]
    assert credentials(headers, b"traffic_access_token=t", upgrade=True) == NOTHING


@pytest.mark.parametrize(
    ("query", "rest"),
    [
        (b"traffic_access_token=t", b""),
        (b"a=%20b&traffic_access_token=t&c", b"a=%20b&c"),
        (b"a=b&&c=+d&", b"a=b&&c=+d&"),
        (b"xtraffic_access_token=t", b"xtraffic_access_token=t"),
    ],
)
def test_the_token_does_not_reach_the_guest_and_the_rest_stays_as_it_is(query: bytes, rest: bytes) -> None:
    assert without_token(query) == rest


def test_a_request_that_the_agent_would_turn_away_wakes_nobody() -> None:
    tokens = Tokens(envd="secret", traffic=None)
    assert not may_wake(49983, tokens, NOTHING, "POST", b"/process.Process/Start", b"")
    assert not may_wake(49983, tokens, Credentials(None, b"other"), "POST", b"/process.Process/Start", b"")
    assert may_wake(49983, tokens, Credentials(None, b"secret"), "POST", b"/process.Process/Start", b"")
    assert may_wake(49983, Tokens(None, None), NOTHING, "POST", b"/process.Process/Start", b"")
    assert may_wake(8080, tokens, NOTHING, "GET", b"/", b"")


def test_health_wakes_a_public_sandbox_only() -> None:
    assert may_wake(49983, Tokens("secret", None), NOTHING, "GET", b"/health", b"")
    assert not may_wake(49983, Tokens("secret", "traffic"), NOTHING, "GET", b"/health", b"")
    assert may_wake(49983, Tokens("secret", "traffic"), Credentials(None, b"secret"), "GET", b"/health", b"")


def test_a_signed_link_wakes_the_sandbox_that_signed_it() -> None:
    query = urlencode({"path": "/a", "signature": sign("/a", "read", "", "secret", None)}).encode()
    assert may_wake(49983, Tokens("secret", None), NOTHING, "GET", b"/files", query)
    assert not may_wake(49983, Tokens("other", None), NOTHING, "GET", b"/files", query)
    assert not may_wake(49983, Tokens("secret", None), NOTHING, "POST", b"/files", query)
    assert not may_wake(49983, Tokens("secret", None), NOTHING, "GET", b"/envs", query)
