"""Settings: who wins, where a value came from, and what is refused with which advice."""

import contextlib
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from agentenv.config import resolve as resolve_module
from agentenv.config.environment import variables
from agentenv.config.fields import settings_by_name
from agentenv.config.resolve import resolve
from agentenv.config.schema import Settings
from agentenv.model.errors import Invalid
from tools.config_reference import PAGE, render

KEY = "k" * 40


@pytest.fixture(autouse=True)
def no_file_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resolve_module, "DEFAULT_FILE", tmp_path / "none.toml")


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_with_nothing_given_everything_is_default() -> None:
    resolved = resolve()

    assert resolved.settings == Settings()
    assert {resolved.origin(name) for name in settings_by_name()} == {"default"}
    assert resolved.notes == ()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = _file(tmp_path, "[server]\nlisten_port = 1\nlisten_host = '1.1.1.1'\ndomains = ['a.example']\n")
    environ = {"AENV_SERVER_LISTEN_PORT": "2", "AENV_SERVER_LISTEN_HOST": "2.2.2.2"}

    resolved = resolve({"server.listen_port": 3, "server.listen_host": None}, environ, path)

    server = resolved.settings.server
    assert (server.listen_port, server.listen_host, server.domains) == (3, "2.2.2.2", ("a.example",))
    assert resolved.origin("server.listen_port") == "flag"
    assert resolved.origin("server.listen_host") == "environment AENV_SERVER_LISTEN_HOST"
    assert resolved.origin("server.domains") == f"file {path}"
    assert resolved.origin("limits.keep_alive_s") == "default"


def test_the_origin_of_what_is_no_setting_is_refused() -> None:
    with pytest.raises(Invalid) as refused:
        resolve().origin("server.port")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [("", ()), ("10.0.0.0/8", ("10.0.0.0/8",)), (" 10.0.0.0/8 , 192.168.1.0/24,", ("10.0.0.0/8", "192.168.1.0/24"))],
)
def test_lists_in_the_environment_are_separated_by_commas(text: str, value: tuple[str, ...]) -> None:
    network = resolve(environ={"AENV_NETWORK_ALLOW_PRIVATE": text}).settings.network
    assert network.allow_private == tuple(IPv4Network(item) for item in value)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("0.0.0.0:9000", "0.0.0.0", 9000), ("[::1]:80", "::1", 80), (":::80", "::", 80)],
)
def test_one_variable_sets_host_and_port(address: str, host: str, port: int) -> None:
    server = resolve(environ={"API_ADDR": address}).settings.server
    assert (server.listen_host, server.listen_port) == (host, port)


def test_short_names_of_the_published_system_are_understood() -> None:
    settings = resolve(
        environ={
            "AENV_API_KEY": KEY,
            "AENV_HOME_PATH": "/srv/aenv",
            "AENV_RUNTIME_PATH": "/run/x",
            "AENV_SANDBOX_PROXY_DOMAINS": "a.example,b.example:8443",
            "AENV_NODE_ID": "node-1",
        }
    ).settings

    assert settings.auth.api_key == SecretStr(KEY)
    assert (settings.paths.home, settings.paths.runtime) == (Path("/srv/aenv"), Path("/run/x"))
    assert settings.server.domains == ("a.example", "b.example:8443")
    assert settings.node.id == "node-1"


def test_a_setting_given_twice_must_be_given_alike() -> None:
    resolve(environ={"AENV_HOME_PATH": "/a", "AENV_PATHS_HOME": "/a"})
    with pytest.raises(Invalid, match=r"paths\.home is set twice"):
        resolve(environ={"AENV_HOME_PATH": "/a", "AENV_PATHS_HOME": "/b"})


def test_names_without_effect_are_told_and_not_refused() -> None:
    (note,) = resolve(environ={"AENV_DEPS_PATH": "/x"}).notes
    assert "AENV_DEPS_PATH" in note


def test_what_kubernetes_says_about_a_service_called_aenv_is_not_ours() -> None:
    linked = {
        "AENV_SERVICE_HOST": "10.0.0.1",
        "AENV_SERVICE_PORT": "8000",
        "AENV_SERVICE_PORT_HTTP": "8000",
        "AENV_PORT": "tcp://10.0.0.1:8000",
        "AENV_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "AENV_PORT_8000_TCP_PROTO": "tcp",
        "AENV_NODE_PORT_8000_TCP_ADDR": "fd00::1",
    }
    assert resolve(environ=linked).settings == Settings()


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"AENV_SERVER_LISTENPORT": "1"}, "AENV_SERVER_LISTEN_PORT"),
        ({"AENV_HOMEPATH": "/x"}, "AENV_HOME_PATH"),
        ({"AENV_PORT": "8000; rm"}, None),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest(environ: dict[str, str], hint: str | None) -> None:
    with pytest.raises(Invalid) as refused:
        resolve(environ=environ)
    assert next(iter(environ)) in refused.value.message
    assert hint is None or hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[sever]\nlisten_port = 1\n", "server"),
        ("[server]\nlisten_prot = 1\n", "server.listen_port"),
        ("[server]\nmax_body_bytes = 1\n", "limits.max_body_bytes"),
        ("[server.tls]\ncert = 'x'\n", None),
        ("listen_port = 1\n", None),
    ],
)
def test_an_unknown_name_in_the_file_is_refused_with_the_nearest(tmp_path: Path, text: str, hint: str | None) -> None:
    with pytest.raises(Invalid) as refused:
        resolve(file=_file(tmp_path, text))
    assert "config.toml" in refused.value.message
    assert hint is None or hint in str(refused.value.hint)


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(Invalid, match="among the flags"):
        resolve({"server.port": 1})


@pytest.mark.parametrize(
    "line",
    ["listen_port = '80'", "listen_port = true", "listen_port = 80.5", "listen_port = 65536", "listen_port = -1",
     "listen_port = 1979-05-27", "listen_port = nan", "listen_host = 1", "listen_host = ''", "domains = 'a.example'",
     "domains = [1]", "domains = ['UPPER.example']", "domains = ['a b']", "domains = ['-x']"],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_in_the_file_is_refused_by_name(tmp_path: Path, line: str) -> None:
    with pytest.raises(Invalid, match=rf"server\.{line.split(maxsplit=1)[0]} from file .*config\.toml"):
        resolve(file=_file(tmp_path, f"[server]\n{line}\n"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("AENV_SERVER_LISTEN_PORT", "http"), ("AENV_SERVER_LISTEN_PORT", "1e3"), ("AENV_VMM_ACCELERATOR", "pvm"),
     ("AENV_NETWORK_VETH_CIDR", "10.0.0.1/8"), ("AENV_NETWORK_VETH_CIDR", "fd00::/8"), ("AENV_LOG_LEVEL", "loud"),
     ("AENV_SANDBOX_FORK_MAX", "0"), ("AENV_NODE_ID", "../x"), ("AENV_GUEST_INIT_TIMEOUT_S", "nan"),
     ("AENV_LIMITS_KEEP_ALIVE_S", "0"), ("AENV_LIMITS_KEEP_ALIVE_S", "inf")],
)  # fmt: skip
def test_a_bad_value_in_the_environment_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(Invalid, match=f"from environment {name}") as refused:
        resolve(environ={name: text})
    assert refused.value.hint


@pytest.mark.parametrize("address", ["8000", ":8000", "host", "host:", "host:http", "host:70000"])
def test_a_bad_listen_address_is_refused(address: str) -> None:
    with pytest.raises(Invalid):
        resolve(environ={"API_ADDR": address})


def test_values_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(Invalid, match="overlap"):
        resolve({"network.veth_cidr": "10.11.128.0/17"})
    with pytest.raises(Invalid, match="warm_low"):
        resolve({"network.warm_low": 17})


@pytest.mark.parametrize("content", [b"[server", b"\xff\xfe", b"a = " + b"[" * 50_000, b"#" * (1 << 20) + b"#"])
def test_a_file_that_is_not_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=r"config\.toml"):
        resolve(file=path)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read"):
        resolve(environ={"AENV_CONFIG_PATH": str(tmp_path / "missing.toml")})
    with pytest.raises(Invalid, match="cannot be read"):
        resolve(file=tmp_path)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "[log]\nlevel = 'debug'\n")
    resolved = resolve(environ={"AENV_CONFIG_PATH": str(path)})
    assert resolved.settings.log.level == "debug"
    assert resolved.file == path


def test_relative_paths_are_those_of_the_file_or_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    path = _file(tmp_path, "[paths]\nhome = 'home'\n[guest]\nca_bundle = '/etc/ca.pem'\n")

    settings = resolve({"guest.image_dir": Path("guest")}, {"AENV_RUNTIME_PATH": "run"}, path).settings

    assert settings.paths.home == tmp_path / "home"
    assert settings.paths.runtime == Path("/usr/run")
    assert settings.guest.image_dir == Path("/usr/guest")
    assert settings.guest.ca_bundle == Path("/etc/ca.pem")


def test_a_secret_never_shows(tmp_path: Path) -> None:
    path = _file(tmp_path, f"[auth]\ntoken_seed = '{'s' * 40}'\n")
    resolved = resolve(environ={"AENV_API_KEY": KEY}, file=path)

    for shown in (repr(resolved), str(resolved.settings), resolved.settings.model_dump_json()):
        assert KEY not in shown
        assert "s" * 40 not in shown


def test_a_wrong_secret_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as refused:
        resolve(file=_file(tmp_path, "[auth]\napi_key = 123456789\n"))
    assert "123456789" not in refused.value.message


def test_a_file_with_a_secret_that_others_can_read_is_told(tmp_path: Path) -> None:
    path = _file(tmp_path, f"[auth]\napi_key = '{KEY}'\n")
    assert resolve(file=path).notes == ()
    path.chmod(0o644)
    (note,) = resolve(file=path).notes
    assert "chmod 600" in note


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().server.listen_port = 1  # type: ignore[misc]


@given(st.dictionaries(st.text(max_size=12).map(lambda name: f"AENV_{name}"), st.text(max_size=8), max_size=3))
def test_any_environment_is_understood_or_refused_with_a_kind(environ: dict[str, str]) -> None:
    with contextlib.suppress(Invalid):
        resolve(environ=environ)


@given(st.sampled_from(sorted(settings_by_name())), st.text(max_size=20))
def test_any_text_for_any_setting_is_understood_or_refused_by_name(name: str, text: str) -> None:
    refused = None
    try:
        resolve({name: text})
    except Invalid as error:
        refused = error.message
    assert refused is None or name in refused


def test_every_setting_says_what_it_means_and_has_one_variable() -> None:
    settings = settings_by_name()
    assert [name for name, setting in settings.items() if not setting.description] == []
    assert {variable.setting for variable in variables().values()} - {None} == set(settings)
    assert [variable.name for variable in variables().values() if not variable.help] == []


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run python -m tools.config_reference"
