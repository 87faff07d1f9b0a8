"""Where in another firewall slots need a way through."""

import pytest

from agentenv.network.neighbours import Chain, wanted_openings


def chain(name: str, hook: str = "", policy: str = "", *, family: str = "ip", table: str = "filter") -> Chain:
    return Chain(family, table, name, hook, policy)


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([], []),
        ([chain("FORWARD", "forward", "accept"), chain("INPUT", "input", "accept")], []),
        ([chain("FORWARD", "forward", "drop")], [("FORWARD", "iifname"), ("FORWARD", "oifname")]),
        ([chain("INPUT", "input", "drop")], [("INPUT", "iifname")]),
        (
            [chain("FORWARD", "forward", "drop"), chain("DOCKER-USER")],
            [("DOCKER-USER", "iifname"), ("DOCKER-USER", "oifname")],
        ),
        ([chain("FORWARD", "forward", "accept"), chain("DOCKER-USER")], []),
        ([chain("FORWARD", "forward", "drop", table="mine")], []),
        ([chain("FORWARD", "forward", "drop", family="inet")], []),
        ([chain("OUTPUT", "output", "drop")], []),
    ],
)
def test_only_what_drops_by_default_is_opened(chains: list[Chain], expected: list[tuple[str, str]]) -> None:
    assert wanted_openings(chains) == expected
