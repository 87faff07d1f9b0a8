"""Other firewalls on the host, and the least that makes them let slots through.

In nftables a packet must pass every table: where Docker or a firewall tool has set
the policy of ``ip filter`` to drop, what our own table accepts is dropped there.
Rules of the form those tools make themselves are put in front, and taken away at
the end; what a slot may reach is still decided by our own table.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from agentenv.model.errors import AgentEnvError
from agentenv.network.nft import Nft

# Table and chain of iptables, and the chain in which Docker leaves room for others.
_TABLE: Final = "filter"
_ROOM: Final = "DOCKER-USER"
_LEGACY: Final = Path("/proc/thread-self/net/ip_tables_names")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of another table; ``hook`` and ``policy`` are empty for one that is only jumped to."""

    family: str
    table: str
    name: str
    hook: str
    policy: str

    @property
    def is_iptables(self) -> bool:
        return self.family == "ip" and self.table == _TABLE


class OtherFirewalls:
    """Openings for the links that match *pattern* in the firewalls of others. Blocking, on the host."""

    def __init__(self, nft: Nft, pattern: str) -> None:
        self._nft = nft
        self._pattern = pattern
        self._warned: set[str] = set()

    def open(self) -> None:
        """Put what is missing in front of chains that drop. Idempotent. What cannot be read or changed is logged."""
        try:
            self._open()
        except AgentEnvError as error:
            # Most hosts have no such firewall: one that cannot be read is no reason to refuse to start.
            self._warn(f"unreadable: {error}", "forward")

    def _open(self) -> None:
        chains = list(_chains(self._nft.read("list chains")))
        for where, direction in wanted_openings(chains):
            if not self._handles(where, direction):
                self._nft.run(f'insert rule ip {_TABLE} {where} {direction} "{self._pattern}" counter accept\n')
                _log.warning("the host's firewall drops by default: let %s %s pass %s", direction, self._pattern, where)
        for chain in chains:
            if chain.policy == "drop" and chain.hook in {"input", "forward"} and not chain.is_iptables:
                self._warn(f"{chain.family} {chain.table} {chain.name}", chain.hook)
        if _TABLE in _legacy_tables():
            self._warn("legacy iptables", "forward")

    def close(self) -> None:
        """Take our rules away again. Raises `Unavailable`."""
        chains = list(_chains(self._nft.read("list chains")))
        for where, direction in sorted({*wanted_openings(chains), *_possible_openings(chains)}):
            for handle in self._handles(where, direction):
                self._nft.run(f"delete rule ip {_TABLE} {where} handle {handle}\n")

    def _handles(self, chain: str, direction: str) -> list[int]:
        listing = json.loads(self._nft.read(f"list chain ip {_TABLE} {chain}"))
        rules = (entry["rule"] for entry in listing["nftables"] if "rule" in entry)
        return [rule["handle"] for rule in rules if _matches(rule, direction, self._pattern)]

    def _warn(self, where: str, hook: str) -> None:
        if where not in self._warned:
            self._warned.add(where)
            _log.warning(
                "another firewall may drop what sandboxes send (%s, %s): it has to accept links called %s",
                where,
                hook,
                self._pattern,
            )


def wanted_openings(chains: list[Chain]) -> list[tuple[str, str]]:
    """Chain and direction of each rule that slots need in ``ip filter``."""
    room = any(chain.is_iptables and chain.name == _ROOM for chain in chains)
    openings = []
    for chain in chains:
        if not chain.is_iptables or chain.policy != "drop":
            continue
        if chain.hook == "forward":
            where = _ROOM if room else chain.name
            openings += [(where, "iifname"), (where, "oifname")]
        elif chain.hook == "input":
            openings.append((chain.name, "iifname"))
    return openings


def _possible_openings(chains: list[Chain]) -> list[tuple[str, str]]:
    names = {chain.name for chain in chains if chain.is_iptables and (chain.hook or chain.name == _ROOM)}
    return [(name, direction) for name in names for direction in ("iifname", "oifname")]


def _chains(listing: str) -> Iterator[Chain]:
    for entry in json.loads(listing)["nftables"]:
        if (chain := entry.get("chain")) is not None:
            yield Chain(chain["family"], chain["table"], chain["name"], chain.get("hook", ""), chain.get("policy", ""))


def _matches(rule: dict[str, Any], direction: str, pattern: str) -> bool:
    wanted = {"left": {"meta": {"key": direction}}, "right": pattern}
    return any({key: match.get(key) for key in wanted} == wanted for match in _match_expressions(rule))


def _match_expressions(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for expression in rule.get("expr", []):
        if isinstance(expression, dict) and isinstance(expression.get("match"), dict):
            yield expression["match"]


def _legacy_tables() -> set[str]:
    try:
        return set(_LEGACY.read_text().split())
    except OSError:
        return set()
