"""Fields of requests: what each becomes in the model, and which values are refused before anything is made."""

from ipaddress import IPv4Network
from typing import Any

import httpx
import pytest

from agentenv.api.fields import MAX_DESTINATIONS
from agentenv.model.limits import MAX_TIMEOUT_S
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import CreateSandbox, OnTimeout
from agentenv.testing.node import FakeNode
from tests.unit.api.client import refused


async def test_only_a_template_is_needed_and_v1_lives_15_s(api: httpx.AsyncClient, node: FakeNode) -> None:
    assert (await api.post("/sandboxes", json={"templateID": "base"})).status_code == 201

    assert node.asked == [CreateSandbox(template="base", timeout_s=15)]
    assert node.asked[0].secure
    assert node.asked[0].on_timeout is OnTimeout.KILL
    assert not node.asked[0].auto_resume


async def test_v2_lives_300_s(api: httpx.AsyncClient, node: FakeNode) -> None:
    assert (await api.post("/v2/sandboxes", json={"templateID": "base"})).status_code == 201

    assert node.asked == [CreateSandbox(template="base", timeout_s=300)]


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
async def test_every_field_reaches_the_node(api: httpx.AsyncClient, node: FakeNode, path: str) -> None:
    body = {
        "templateID": "base", "timeout": 77, "autoPause": True, "autoResume": {"enabled": True}, "secure": True,
        "metadata": {"a b": "c\nd"}, "envVars": {"PATH": "/bin", "a.b-c": ""}, "allow_internet_access": False,
        "network": {
            "allowPublicTraffic": False, "allowOut": ["8.8.8.8", "1.1.1.0/24", "8.8.8.8/32"],
            "denyOut": ["0.0.0.0/0", "10.1.2.3/8"], "maskRequestHost": "localhost:${PORT}",
        },
    }  # fmt: skip

    assert (await api.post(path, json=body)).status_code == 201

    assert node.asked == [
        CreateSandbox(
            template="base", timeout_s=77, on_timeout=OnTimeout.PAUSE, auto_resume=True, secure=True,
            metadata={"a b": "c\nd"}, env={"PATH": "/bin", "a.b-c": ""},
            egress=EgressPolicy(
                allow_internet=False,
                allow_out=(IPv4Network("8.8.8.8/32"), IPv4Network("1.1.1.0/24")),
                deny_out=(IPv4Network("0.0.0.0/0"), IPv4Network("10.0.0.0/8")),
            ),
            ingress=IngressPolicy(allow_public_traffic=False, mask_request_host="localhost:${PORT}"),
        )
    ]  # fmt: skip


async def test_a_sandbox_may_be_insecure_on_v1_and_never_on_v2(api: httpx.AsyncClient) -> None:
    body = {"templateID": "base", "secure": False}

    assert "envdAccessToken" not in (await api.post("/sandboxes", json=body)).json()
    assert "envdAccessToken" in (await api.post("/v2/sandboxes", json=body)).json()


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
@pytest.mark.parametrize(
    "timeout",
    [0, -1, MAX_TIMEOUT_S + 1, 2**63, 10**30, 1.0, 1.5, "60", "", True, False, None, [60], {"s": 60}],
)
async def test_a_time_to_live_is_a_whole_number_of_seconds_within_bounds(
    api: httpx.AsyncClient, node: FakeNode, path: str, timeout: object
) -> None:
    answer = await api.post(path, json={"templateID": "base", "timeout": timeout})

    assert "timeout" in refused(answer, 400, "invalid")
    assert node.asked == []


@pytest.mark.parametrize("timeout", [1, MAX_TIMEOUT_S])
async def test_the_bounds_of_a_time_to_live_are_within(api: httpx.AsyncClient, timeout: int) -> None:
    assert (await api.post("/sandboxes", json={"templateID": "base", "timeout": timeout})).status_code == 201


@pytest.mark.parametrize(
    "template",
    [
        "", "../base", "..", ".", "/base", "a/b/c", "base\n", "base\x00", "\x1b[31m", "base ", " base", "ba se",
        "base:", ":default", "base:a:b", "a//b", "x" * 129, "x" * 100_000, "é", "base?x", "base#x", "base%2e", "-base",
        1, None, ["base"], {}, True,
    ],
)  # fmt: skip
async def test_what_cannot_name_a_template_creates_nothing(
    api: httpx.AsyncClient, node: FakeNode, template: object
) -> None:
    answer = await api.post("/sandboxes", json={"templateID": template})

    assert "templateID" in refused(answer, 400, "invalid")
    assert node.asked == []


async def test_an_unknown_template_is_not_found(api: httpx.AsyncClient, node: FakeNode) -> None:
    refused(await api.post("/sandboxes", json={"templateID": "nothing"}), 404, "not_found")

    assert node.sandboxes() == []


@pytest.mark.parametrize("reference", ["base", "base:default", "team/base", "team/base:default"])
async def test_a_template_may_come_with_a_namespace_and_the_default_tag(api: httpx.AsyncClient, reference: str) -> None:
    assert (await api.post("/sandboxes", json={"templateID": reference})).status_code == 201


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": None}}, "metadata.a"),
    ({"metadata": {"": "x"}}, "metadata"),
    ({"metadata": {"a\n": "x"}}, "metadata"),
    ({"metadata": {"a": "\x00"}}, "metadata.a"),
    ({"metadata": {"k" * 257: "x"}}, "metadata"),
    ({"metadata": {"a": "v" * 4097}}, "metadata.a"),
    ({"metadata": {str(n): "x" for n in range(129)}}, "metadata"),
    ({"metadata": []}, "metadata"),
    ({"envVars": {"A=B": "x"}}, "envVars"),
    ({"envVars": {"A B": "x"}}, "envVars"),
    ({"envVars": {"1A": "x"}}, "envVars"),
    ({"envVars": {"": "x"}}, "envVars"),
    ({"envVars": {"A\n": "x"}}, "envVars"),
    ({"envVars": {"A": "x\x00y"}}, "envVars.A"),
    ({"envVars": {"A": 1}}, "envVars.A"),
    ({"envVars": {"A": "x" * 65537}}, "envVars.A"),
    ({"envVars": {f"A{n}": "x" for n in range(513)}}, "envVars"),
    ({"autoPause": 1}, "autoPause"),
    ({"autoPause": "true"}, "autoPause"),
    ({"secure": "yes"}, "secure"),
    ({"autoResume": True}, "autoResume"),
    ({"autoResume": {}}, "autoResume.enabled"),
    ({"autoResume": {"enabled": True, "x": 1}}, "autoResume.x"),
    ({"allow_internet_access": True, "allowInternetAccess": False}, "disagree"),
    ({"network": {"allowOut": ["example.com"]}}, "network.allowOut.0: domain names"),
    ({"network": {"allowOut": ["*.example.com"]}}, "domain names"),
    ({"network": {"denyOut": ["example.com"]}}, "network.denyOut.0: domain names"),
    ({"network": {"allowOut": ["::1"]}}, "IPv6"),
    ({"network": {"allowOut": ["2001:db8::/32"]}}, "IPv6"),
    ({"network": {"allowOut": ["1.2.3.4", "1.2.3.4/33"]}}, "network.allowOut.1"),
    ({"network": {"allowOut": ["1.2.3.256"]}}, "network.allowOut.0"),
    ({"network": {"allowOut": ["1.2.3"]}}, "network.allowOut.0"),
    ({"network": {"allowOut": ["01.2.3.4"]}}, "network.allowOut.0"),
    ({"network": {"allowOut": ["1.2.3.4/255.0.0.0"]}}, "network.allowOut.0"),
    ({"network": {"allowOut": ["1.2.3.4 "]}}, "network.allowOut.0"),
    ({"network": {"allowOut": [""]}}, "network.allowOut.0"),
    ({"network": {"allowOut": [1]}}, "network.allowOut.0"),
    ({"network": {"allowOut": "1.2.3.4"}}, "network.allowOut"),
    ({"network": {"allowOut": ["1.2.3.4"] * (MAX_DESTINATIONS + 1)}}, "network.allowOut"),
    ({"network": {"allowPublicTraffic": "no"}}, "network.allowPublicTraffic"),
    ({"network": {"maskRequestHost": ""}}, "network.maskRequestHost"),
    ({"network": {"maskRequestHost": "a\r\nX-Evil: 1"}}, "network.maskRequestHost"),
    ({"network": {"maskRequestHost": "a b"}}, "network.maskRequestHost"),
    ({"network": {"maskRequestHost": "a/${PORT}"}}, "network.maskRequestHost"),
    ({"network": None}, "network"),
    ({"mcp": "x"}, "mcp"),
]


@pytest.mark.parametrize(("fields", "names"), WRONG)
async def test_a_wrong_field_is_named_and_creates_nothing(
    api: httpx.AsyncClient, node: FakeNode, fields: dict[str, Any], names: str
) -> None:
    for path in ("/sandboxes", "/v2/sandboxes"):
        answer = await api.post(path, json={"templateID": "base", **fields})

        assert names in refused(answer, 400, "invalid")
    assert node.asked == []


@pytest.mark.parametrize(
    "fields",
    [
        {"volumeMounts": [{"name": "a", "path": "/b"}]},
        {"iam": {"tokens": {"a": {"audience": "b", "tokenType": "c"}}}},
        {"autoPauseMemory": False},
        {"customExtensionParams": {"a": 1}},
        {"network": {"egressProxy": {"address": "proxy:1080"}}},
        {"network": {"dnsServers": ["8.8.8.8"]}},
        {"network": {"rules": {"example.com": []}}},
        {"network": {"httpsPorts": [443]}},
    ],
)
async def test_what_this_release_lacks_is_refused_when_it_would_change_something(
    api: httpx.AsyncClient, node: FakeNode, fields: dict[str, Any]
) -> None:
    answer = await api.post("/v2/sandboxes", json={"templateID": "base", **fields})

    assert "not supported" in refused(answer, 400, "unsupported")
    assert node.asked == []


async def test_what_this_release_lacks_is_accepted_while_it_is_empty(api: httpx.AsyncClient) -> None:
    body = {
        "templateID": "base", "volumeMounts": [], "iam": {"tokens": {}}, "autoPauseMemory": True, "mcp": {"any": {}},
        "customExtensionParams": {},
        "network": {"egressProxy": None, "dnsServers": [], "rules": {}, "httpsPorts": [], "allowPublicTraffic": None},
    }  # fmt: skip

    assert (await api.post("/v2/sandboxes", json=body)).status_code == 201


@pytest.mark.parametrize("spelling", ["allow_internet_access", "allowInternetAccess"])
@pytest.mark.parametrize("value", [True, False])
async def test_internet_access_has_two_spellings(
    api: httpx.AsyncClient, node: FakeNode, spelling: str, value: bool
) -> None:
    assert (await api.post("/sandboxes", json={"templateID": "base", spelling: value})).status_code == 201

    assert node.asked[0].egress.allow_internet is value
