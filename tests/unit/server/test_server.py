"""What the program decides itself: the domain that clients are told, and whose start-up lines are logged."""

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from agentenv.config import schema
from agentenv.config.schema import Server, Settings
from agentenv.listen import bind, heed_signals
from agentenv.logs import set_up_logs
from agentenv.model.errors import Conflict, Invalid
from agentenv.model.ids import new_sandbox_id
from agentenv.proxy.inbound.serve import http_server
from agentenv.proxy.route import ToSandbox, Via, route
from agentenv.server import _api, _network, _node_settings, _proxy, client_domain, key_origin


def listening(host: str, port: int = 8123, *domains: str) -> Settings:
    return Settings(server=Server(listen_host=host, listen_port=port, domains=domains))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "0.0.0.0", "::", "localhost"])
def test_without_a_domain_clients_are_sent_here_and_not_to_a_service_of_others(host: str) -> None:
    domain = client_domain(listening(host))

    assert domain == "localhost:8123"
    sandbox_id = new_sandbox_id()
    decision = route("GET", [(b"host", f"8080-{sandbox_id}.{domain}".encode())], b"/x", b"")
    assert isinstance(decision, ToSandbox)
    assert (decision.sandbox_id, decision.port, decision.via) == (sandbox_id, 8080, Via.HOST)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 8123), ("node.example.com", 8123), ("127.0.0.1", 0)])
def test_where_localhost_may_not_lead_here_nothing_is_told(host: str, port: int) -> None:
    assert client_domain(listening(host, port)) is None


def test_a_domain_of_the_operator_wins() -> None:
    assert client_domain(listening("127.0.0.1", 8123, "first.example.com", "second.example.com")) == "first.example.com"


async def test_a_port_in_use_is_said_with_what_to_set() -> None:
    (first,) = await bind("127.0.0.1", 0, backlog=1)
    with first:
        port = first.getsockname()[1]
        with pytest.raises(Conflict, match=str(port)) as refused:
            await bind("127.0.0.1", port, backlog=1)

    assert refused.value.hint == "set server.listen_port"


async def test_an_address_of_another_machine_is_invalid() -> None:
    with pytest.raises(Invalid, match=r"192\.0\.2\.1"):
        await bind("192.0.2.1", 0, backlog=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_is_answered_with_how_long_stopping_may_take(number: signal.Signals) -> None:
    async def app(_scope: object, _receive: object, _send: object) -> None:
        """Nobody asks."""

    server = http_server(app)
    loop = asyncio.get_running_loop()
    listening = await bind("127.0.0.1", 0, backlog=1)
    try:
        with structlog.testing.capture_logs() as logs:
            heed_signals(server, 7.0)
            serving = asyncio.create_task(server.serve(sockets=listening))
            loop.call_soon(os.kill, os.getpid(), number)  # after the task's first step, which takes the signals over
            async with asyncio.timeout(30):
                await serving
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    assert [line["event"] for line in logs] == ["stopping; requests under way get 7 s"]


def test_the_place_of_the_key_is_known_without_the_key(tmp_path: Path) -> None:
    def origin(**auth: str) -> str:
        return key_origin(Settings.model_validate({"paths": {"home": str(tmp_path)}, "auth": auth}))

    key = "k" * 40
    assert origin() == f"{tmp_path}/secrets/api-key"
    assert origin(api_key_file="/x/key") == "/x/key"
    assert origin(api_key=key) == "auth.api_key"


@pytest.fixture
def loggers() -> Iterator[None]:
    """As they were."""
    names = ("", "alembic", "uvicorn")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers[:]
    configured = structlog.get_config()
    yield
    structlog.configure(**configured)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger().handlers[:] = handlers


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize("name", ["alembic.runtime.plugins", "alembic.runtime.migration", "uvicorn.error"])
@pytest.mark.parametrize("level", ["debug", "info", "error"])
def test_libraries_do_not_announce_themselves(name: str, level: str) -> None:
    set_up_logs(Settings.model_validate({"log": {"level": level}}).log)

    logger = logging.getLogger(name)
    assert not logger.isEnabledFor(logging.INFO)
    assert logger.isEnabledFor(logging.WARNING) is (level != "error")
    assert logger.isEnabledFor(logging.ERROR)


def part(settings: Settings, section: str) -> object:
    """What the part of the server that *section* is about is given."""
    key = "k" * 40
    match section:
        case "sandbox" | "guest":
            return _node_settings(settings, Path("kernel"), Path("initramfs"))
        case "network":
            return _network(settings)
        case "proxy":
            return _proxy(settings, key)
        case _:
            return _api(settings, key)


RENAMED = {  # where the part has another word for it
    "sandbox.auto_resume_min_timeout_s": "auto_resume_timeout_s",
    "guest.init_timeout_s": "agent_timeout_s",
}
ELSEWHERE = {"guest.image_dir", "guest.ca_bundle"}  # are looked for, and read
OTHER: dict[str, object] = {  # of those that are not numbers
    "network.name_prefix": "other",
    "network.address_cidr": "10.201.0.0/16",
    "network.veth_cidr": "10.202.0.0/16",
    "network.max_slots": 17,
    "network.always_denied": ["10.0.0.0/8"],
    "network.allow_private": ["10.7.0.0/16"],
    "network.dns_upstreams": ["192.0.2.1"],
    "network.mtu": 1400,
}


def numbered(section: str) -> Iterator[tuple[str, object]]:
    """Every setting of *section*, with a value that is not its default."""
    for name, field in schema.Settings.model_fields[section].annotation.model_fields.items():  # type: ignore[union-attr]
        path = f"{section}.{name}"
        if path not in ELSEWHERE:
            yield path, OTHER[path] if path in OTHER else field.default - 1 if field.default > 1 else field.default / 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(setting for section in ("sandbox", "guest", "network", "proxy") for setting in numbered(section)),
        ("limits.max_body_bytes", 4096),
        ("limits.body_timeout_s", 7.5),
        ("node.cluster_id", "00000000-0000-4000-8000-000000000007"),
        ("node.service_instance_id", "00000000-0000-4000-8000-000000000008"),
    ],
)
def test_what_an_operator_sets_reaches_the_part_that_it_is_about(path: str, value: object) -> None:
    section, name = path.split(".")
    settings = Settings.model_validate({section: {name: value}})
    default = part(Settings(), section)
    attribute = RENAMED.get(path, name)

    given = part(settings, section)

    assert getattr(given, attribute) == getattr(getattr(settings, section), name) != getattr(default, attribute)
    same = {"service_instance_id", attribute}
    for other in dataclasses.fields(given):  # type: ignore[arg-type]
        if other.name not in same:
            assert getattr(given, other.name) == getattr(default, other.name)
