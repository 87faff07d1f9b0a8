"""The texts given to the firewall: what the kernel takes, and what must never be in them."""

import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.model.errors import Unavailable
from agentenv.model.policy import EgressPolicy
from agentenv.network import netns
from agentenv.network.egress import MOST_RANGES, denied_to_all
from agentenv.network.nft import Nft
from agentenv.network.plan import network_plan
from agentenv.network.rules import host_rules, policy_rules, remove_table, slot_rules
from agentenv.network.settings import ALWAYS_DENIED, NetworkSettings

PLAN = network_plan(NetworkSettings(), Path("/unused"))
SLOT = PLAN.slot(5)
DENIED = denied_to_all(ALWAYS_DENIED, (), (PLAN.addresses, PLAN.links))

ranges = st.builds(lambda a, n: IPv4Network((a, n), strict=False), st.integers(0, 2**32 - 1), st.integers(0, 32))
policies = st.builds(
    EgressPolicy,
    st.sampled_from([None, True, False]),
    st.lists(ranges, max_size=8).map(tuple),
    st.lists(ranges, max_size=8).map(tuple),
)


def whole(policy: EgressPolicy) -> str:
    return slot_rules(PLAN, SLOT, policy, denied=DENIED, flows_per_slot=100)


def chain(text: str, name: str) -> list[str]:
    """The rules of a chain in a text with a whole table."""
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index(f"chain {name} {{")
    return lines[start + 1 : lines.index("}", start)]


@given(policies)
def test_a_replaced_policy_is_the_same_as_one_from_the_start(policy: EgressPolicy) -> None:
    replaced: dict[str, list[str]] = {}
    for line in policy_rules(PLAN, policy).splitlines():
        words = line.split(" ", 5)
        assert words[:2] in (["flush", "chain"], ["add", "rule"])
        if words[0] == "flush":
            replaced[words[4]] = []
        else:
            replaced[words[4]].append(words[5])

    assert replaced == {name: chain(whole(policy), name) for name in ("names", "outbound")}


@given(policies)
def test_what_is_denied_to_all_is_refused_before_the_policy_is_asked(policy: EgressPolicy) -> None:
    rules = chain(whole(policy), "outbound")
    first = rules.index("ip daddr @denied goto refuse")

    assert all("goto admit" not in rule or str(PLAN.dns_address) in rule for rule in rules[:first])
    assert rules[-1] in ("goto admit", "goto refuse")


@pytest.mark.needs("root", "netns", "nft")
class TestTheKernel:
    """In a namespace that lasts as long as one test."""

    @pytest.fixture
    def nft(self) -> Iterator[Nft]:
        firewall = Nft()
        yield firewall
        firewall.close()

    def within_new_namespace(self, work: Callable[[], None]) -> None:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                netns.unshare()
                work()
            except BaseException as error:  # noqa: BLE001 - raised again below
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(policies)
    def test_takes_every_policy_twice_and_shows_one(self, nft: Nft, policy: EgressPolicy) -> None:
        def work() -> None:
            nft.run(whole(policy))
            once = nft.read("list ruleset").replace(" ", "")
            nft.run(policy_rules(PLAN, policy))
            nft.run(whole(policy))
            again = nft.read("list ruleset").replace(" ", "")
            for text in ('"chain":', '"rule":', '"table":'):
                assert once.count(text) == again.count(text)

        self.within_new_namespace(work)

    @pytest.mark.parametrize(
        "denied", [DENIED, (IPv4Network("224.0.0.0/3"),), denied_to_all((IPv4Network("0.0.0.0/1"),), (), ())]
    )
    def test_takes_the_hosts_table_with_whatever_is_denied(self, nft: Nft, denied: tuple[IPv4Network, ...]) -> None:
        def work() -> None:
            for _ in range(2):
                nft.run(host_rules(PLAN, denied, 100))
            assert nft.read("list tables").count('"name": "aenv"') == 1
            nft.run(remove_table(PLAN.table))
            nft.run(remove_table(PLAN.table))
            assert '"aenv"' not in nft.read("list tables")

        self.within_new_namespace(work)

    def test_takes_the_longest_policy(self, nft: Nft) -> None:
        policy = EgressPolicy(deny_out=tuple(IPv4Network((index << 9, 32)) for index in range(1, MOST_RANGES + 1)))

        self.within_new_namespace(lambda: nft.run(whole(policy)))

    def test_changes_nothing_when_one_rule_is_wrong(self, nft: Nft) -> None:
        def work() -> None:
            nft.run(whole(EgressPolicy()))
            before = nft.read("list ruleset")
            with pytest.raises(Unavailable, match="firewall"):
                nft.run(policy_rules(PLAN, EgressPolicy(allow_internet=False)) + "add rule inet slot nowhere accept\n")
            assert nft.read("list ruleset") == before

        self.within_new_namespace(work)
