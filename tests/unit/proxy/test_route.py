"""Where a request goes is a function of its head, and every way to be ambiguous is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.proxy.route import (
    Family,
    Refuse,
    ToControl,
    ToSandbox,
    ToSigned,
    Via,
    parse_port,
    route,
)

ID = "0f9a1b2c-3d4e-5f60-8171-92a3b4c5d6e7"
HOST = (b"host", b"api.example.com")

ids = st.uuids().map(str)
ports = st.integers(1, 65535)
raw_paths = st.binary(max_size=60).map(lambda tail: b"/" + tail)
domains = st.sampled_from(["sbx.example.com", "localhost", "x.", "a-b.c:8000", "localhost:80", "e2b.app:"])


def e2b(sandbox_id: str, port: int | None = None) -> list[tuple[bytes, bytes]]:
    headers = [HOST, (b"e2b-sandbox-id", sandbox_id.encode())]
    return headers if port is None else [*headers, (b"e2b-sandbox-port", str(port).encode())]


def agentenv(sandbox_id: str, port: int) -> list[tuple[bytes, bytes]]:
    return [HOST, (b"x-agentenv-sandbox-id", sandbox_id.encode()), (b"x-agentenv-target-port", str(port).encode())]


@given(ids, ports, raw_paths.filter(lambda path: not path.startswith(b"/proxy")), st.binary(max_size=30))
def test_headers_win_over_every_path_and_leave_it_as_it_is(
    sandbox_id: str, port: int, path: bytes, query: bytes
) -> None:
    assert route("GET", e2b(sandbox_id, port), path, query) == ToSandbox(sandbox_id, port, Family.E2B, Via.HEADER, path)
    assert route("GET", agentenv(sandbox_id, port), path, query) == ToSandbox(
        sandbox_id, port, Family.AGENTENV, Via.HEADER, path
    )


@given(ids, ports, domains, raw_paths, st.booleans())
def test_a_host_of_its_own_leaves_even_the_prefix_to_the_application(
    sandbox_id: str, port: int, domain: str, path: bytes, upper: bool
) -> None:
    host = f"{port}-{sandbox_id}.{domain}"
    headers = [(b"host", (host.upper() if upper else host).encode())]
    assert route("GET", headers, path, b"") == ToSandbox(sandbox_id, port, Family.E2B, Via.HOST, path)
    assert route("GET", headers, b"/proxy" + path, b"") == ToSandbox(
        sandbox_id, port, Family.E2B, Via.HOST, b"/proxy" + path
    )


@given(ids, ports, raw_paths)
def test_the_prefix_is_taken_off_and_nothing_else(sandbox_id: str, port: int, path: bytes) -> None:
    for headers, family in ((agentenv(sandbox_id, port), Family.AGENTENV), (e2b(sandbox_id, port), Family.E2B)):
        assert route("POST", headers, b"/proxy" + path, b"") == ToSandbox(sandbox_id, port, family, Via.PREFIX, path)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        (b"/proxy", b"/"),
        (b"/proxy/", b"/"),
        (b"/proxy//a", b"//a"),
        (b"/proxyless", b"/proxyless"),
        (b"/%70roxy/a",) * 2,
    ],
)
def test_only_the_whole_first_segment_is_the_prefix(path: bytes, seen: bytes) -> None:
    decision = route("GET", agentenv(ID, 80), path, b"")
    assert isinstance(decision, ToSandbox)
    assert decision.path == seen


@given(st.text(max_size=8).map(str.encode))
def test_a_port_has_one_spelling(text: bytes) -> None:
    port = parse_port(text)
    assert (port is not None) == (text.isdigit() and text.isascii() and 1 <= int(text) <= 65535 and text[0:1] != b"0")


@pytest.mark.parametrize("port", ["0", "65536", "080", "-1", "+80", " 80", "8_0", "", "http", "99999999999", "٣"])
@pytest.mark.parametrize("name", [b"e2b-sandbox-port", b"x-agentenv-target-port"])
def test_a_port_that_is_none_is_refused(name: bytes, port: str) -> None:
    decision = route("GET", [HOST, (b"e2b-sandbox-id", ID.encode()), (name, port.encode())], b"/", b"")
    assert isinstance(decision, Refuse)
    assert decision.status == 400


@pytest.mark.parametrize("port", ["0", "65536", "00080", "123456"])
def test_a_host_with_a_port_that_is_none_is_refused_and_never_the_control_api(port: str) -> None:
    assert isinstance(route("GET", [(b"host", f"{port}-{ID}.x.y".encode())], b"/health", b""), Refuse)


@pytest.mark.parametrize(
    "host",
    [
        "api.example.com",
        "localhost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[fe80::1%25eth0]",
        "10-244-1-5.ns.pod.cluster.local",
        f"{ID}.example.com",
        f"-{ID}.example.com",
        f"80-{ID}",  # no domain behind it
        f"80-{ID}.",
        f"80-{ID}x.example.com",
        f"user@80-{ID}.example.com",
        f"80-{ID}.a b",
        f"80-{ID}.a/b",
        "",
    ],
)
def test_a_host_that_names_no_sandbox_is_the_control_api(host: str) -> None:
    assert route("GET", [(b"host", host.encode())], b"/health", b"") == ToControl()


def test_without_a_host_it_is_the_control_api_too() -> None:
    assert route("GET", [], b"/health", b"") == ToControl()


def test_e2b_headers_mean_the_agent_where_they_name_no_port() -> None:
    assert route("GET", e2b(ID), b"/health", b"") == ToSandbox(ID, 49983, Family.E2B, Via.HEADER, b"/health")


def test_agentenv_headers_must_name_the_port() -> None:
    assert isinstance(route("GET", [HOST, (b"x-agentenv-sandbox-id", ID.encode())], b"/", b""), Refuse)


@pytest.mark.parametrize("name", [b"e2b-sandbox-port", b"x-agentenv-target-port"])
def test_a_port_without_a_sandbox_is_refused(name: bytes) -> None:
    assert isinstance(route("GET", [HOST, (name, b"80")], b"/health", b""), Refuse)


@pytest.mark.parametrize("path", [b"/proxy", b"/proxy/", b"/proxy/health"])
def test_the_prefix_without_headers_is_refused(path: bytes) -> None:
    assert route("GET", [HOST], path, b"") == Refuse(
        400, "/proxy needs the headers x-agentenv-sandbox-id and x-agentenv-target-port"
    )


@pytest.mark.parametrize(
    "name", [b"host", b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-agentenv-sandbox-id", b"x-agentenv-target-port"]
)
def test_a_header_that_decides_may_be_given_once(name: bytes) -> None:
    headers = [HOST, (b"e2b-sandbox-id", ID.encode()), (b"e2b-sandbox-port", b"80")]
    value = dict(headers).get(name, b"80" if name.endswith(b"port") else ID.encode())
    twice = [pair for pair in headers if pair[0] != name] + [(name, value)] * 2
    decision = route("GET", twice, b"/health", b"")
    assert isinstance(decision, Refuse)
    assert decision.status == 400


@given(ids, ids, ports, ports)
def test_places_that_disagree_are_refused_and_places_that_agree_are_fine(
    one: str, other: str, port: int, other_port: int
) -> None:
    agree = [(b"host", f"{port}-{one}.x.y".encode()), *e2b(one, port)[1:], *agentenv(one, port)[1:]]
    assert route("GET", agree, b"/a", b"") == ToSandbox(one, port, Family.E2B, Via.HOST, b"/a")
    if (one, port) == (other, other_port):
        return
    for headers in (
        [(b"host", f"{port}-{one}.x.y".encode()), *e2b(other, other_port)[1:]],
        [(b"host", f"{port}-{one}.x.y".encode()), *agentenv(other, other_port)[1:]],
        [*e2b(one, port), *agentenv(other, other_port)[1:]],
    ):
        assert isinstance(route("GET", headers, b"/a", b""), Refuse)


def test_an_id_without_a_port_takes_the_port_of_the_host() -> None:
    headers = [(b"host", f"3000-{ID}.x.y".encode()), (b"e2b-sandbox-id", ID.encode())]
    assert route("GET", headers, b"/", b"") == ToSandbox(ID, 3000, Family.E2B, Via.HOST, b"/")


def test_ids_are_compared_as_dns_does() -> None:
    headers = [(b"host", f"3000-{ID.upper()}.x.y".encode()), (b"e2b-sandbox-id", ID.encode())]
    assert route("GET", headers, b"/", b"") == ToSandbox(ID, 3000, Family.E2B, Via.HOST, b"/")


@pytest.mark.parametrize("sandbox_id", [b"", b"x" * 65])
def test_an_id_of_impossible_length_is_refused(sandbox_id: bytes) -> None:
    assert isinstance(route("GET", [HOST, (b"e2b-sandbox-id", sandbox_id)], b"/health", b""), Refuse)


def test_a_signed_link_with_nothing_else_belongs_to_some_sandbox() -> None:
    decision = route("GET", [HOST], b"/files", b"path=%2Fa&signature=v1_x")
    assert isinstance(decision, ToSigned)
    assert decision.path == b"/files"


def test_a_signature_does_not_matter_where_a_sandbox_is_named() -> None:
    assert isinstance(route("GET", e2b(ID), b"/files", b"path=a&signature=v1_x"), ToSandbox)


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("GET", b"/files", b"path=a"),
        ("GET", b"/files", b"signature="),
        ("DELETE", b"/files", b"signature=v1_x"),
        ("GET", b"/files/", b"signature=v1_x"),
        ("GET", b"/sandboxes", b"signature=v1_x"),
    ],
)
def test_other_requests_are_the_control_apis(method: str, path: bytes, query: bytes) -> None:
    assert route(method, [HOST], path, query) == ToControl()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"host", b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-agentenv-sandbox-id", b"accept"]),
            st.binary(max_size=80),
        ),
        max_size=8,
    ),
    st.binary(max_size=80),
    st.binary(max_size=80),
)
def test_no_head_is_too_strange_to_decide_on(headers: list[tuple[bytes, bytes]], path: bytes, query: bytes) -> None:
    decision = route("GET", headers, path, query)
    if isinstance(decision, ToSandbox):
        assert 1 <= decision.port <= 65535
        assert path.endswith(decision.path) or decision.path == b"/"
