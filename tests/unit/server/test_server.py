"""What the program decides itself: the domain that clients are told, and whose start-up lines are logged."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from agentenv.config.schema import Server, Settings
from agentenv.model.ids import new_sandbox_id
from agentenv.proxy.route import ToSandbox, Via, route
from agentenv.server import _set_up_logging, client_domain


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
    _set_up_logging(Settings.model_validate({"log": {"level": level}}))

    logger = logging.getLogger(name)
    assert not logger.isEnabledFor(logging.INFO)
    assert logger.isEnabledFor(logging.WARNING) is (level != "error")
    assert logger.isEnabledFor(logging.ERROR)
