"""What clients see: E2B's shapes with every required key, checked with E2B's own models and with ours."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import IPv4Network

import pytest
from e2b.api.client import models as e2b
from pydantic import TypeAdapter

from agentenv.api import present, responses
from agentenv.api.settings import ApiSettings
from agentenv.guest.contract import GuestMetrics
from agentenv.model.errors import Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import Sandbox
from agentenv.node.contract import LogLine, Tokens
from agentenv.testing.node import FakeNode

POLICY = EgressPolicy(
    allow_internet=False, allow_out=(IPv4Network("8.8.8.0/24"),), deny_out=(IPv4Network("0.0.0.0/0"),)
)


def as_sent(document: object) -> object:
    return json.loads(bytes(present.json_response(document).body))


@pytest.fixture(params=list(State))
def sandbox(request: pytest.FixtureRequest, node: FakeNode) -> Sandbox:
    return node.add_sandbox(state=request.param, ends_at=None)


def test_every_state_is_one_that_e2b_parses(sandbox: Sandbox, settings: ApiSettings) -> None:
    for tokens in (Tokens(None, None), Tokens("envd", "traffic")):
        detail = as_sent(present.sandbox_detail(sandbox, tokens, settings))

        assert e2b.SandboxDetail.from_dict(detail).state.value in ("running", "paused")  # type: ignore[arg-type]
        TypeAdapter(responses.SandboxDetail).validate_json(json.dumps(detail), strict=True)


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (State.CREATING, "running"), (State.RUNNING, "running"), (State.RESUMING, "running"),
        (State.SNAPSHOTTING, "running"), (State.FORKING, "running"), (State.KILLING, "running"),
        (State.PAUSING, "paused"), (State.PAUSED, "paused"), (State.ERROR, "paused"),
    ],
)  # fmt: skip
def test_a_state_has_one_public_name(state: State, shown: str) -> None:
    assert present.public_state(state) == shown


def test_a_new_sandbox_parses_with_and_without_tokens(node: FakeNode, settings: ApiSettings) -> None:
    value = node.add_sandbox()

    open_one = as_sent(present.sandbox(value, Tokens(None, None), settings))
    guarded = as_sent(present.sandbox(replace(value, template_name=None), Tokens("envd", "traffic"), settings))

    for document in (open_one, guarded):
        assert isinstance(document, dict)
        e2b.Sandbox.from_dict(document)
        TypeAdapter(responses.SandboxShape).validate_json(json.dumps(document), strict=True)
    assert "envdAccessToken" not in open_one  # type: ignore[operator]
    assert open_one["trafficAccessToken"] is None  # type: ignore[index]
    assert open_one["domain"] == "sandbox.test:8000"  # type: ignore[index]
    assert guarded["envdAccessToken"] == "envd"  # type: ignore[index]
    assert guarded["trafficAccessToken"] == "traffic"  # type: ignore[index]
    assert "alias" not in guarded  # type: ignore[operator]


def test_the_network_is_shown_once_something_was_chosen(node: FakeNode, settings: ApiSettings) -> None:
    default = present.sandbox_detail(node.add_sandbox(), Tokens(None, None), settings)
    chosen = present.sandbox_detail(node.add_sandbox(egress=POLICY), Tokens(None, None), settings)
    private = IngressPolicy(allow_public_traffic=False)

    assert "network" not in default
    assert default["allowInternetAccess"] is None
    assert chosen["network"] == {"allowPublicTraffic": True, "allowOut": ["8.8.8.0/24"], "denyOut": ["0.0.0.0/0"]}
    assert chosen["allowInternetAccess"] is False
    assert present.network(EgressPolicy(), private) == {"allowPublicTraffic": False, "allowOut": [], "denyOut": []}


def test_a_sandbox_without_an_end_has_one_far_away_that_does_not_move(node: FakeNode) -> None:
    value = node.add_sandbox(ends_at=None)

    shown = present.listed_sandbox(value)

    assert shown["endAt"] == present.timestamp(value.created_at + timedelta(days=36_500))


def test_environment_variables_are_never_shown(node: FakeNode, settings: ApiSettings) -> None:
    value = node.add_sandbox(env={"TOKEN": "hunter2"})

    assert "hunter2" not in json.dumps(present.sandbox_detail(value, Tokens(None, None), settings))


def test_times_are_utc_with_a_zone() -> None:
    east = timezone(timedelta(hours=5, minutes=30))

    assert present.timestamp(datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC)) == "2026-01-02T03:04:05.678Z"
    assert present.timestamp(datetime(2026, 1, 2, 8, 34, 5, 0, east)) == "2026-01-02T03:04:05.000Z"


def test_catalogue_shapes_parse(node: FakeNode) -> None:
    value = replace(node.find_snapshot("base"), last_spawned_at=datetime(2026, 1, 1, tzinfo=UTC))

    e2b.SnapshotInfo.from_dict(present.snapshot(value))
    e2b.Template.from_dict(present.template(value))
    e2b.TemplateWithBuilds.from_dict(present.template_detail(value))
    for shape, document in (
        (responses.SnapshotShape, present.snapshot(value)),
        (responses.TemplateShape, present.template(value)),
        (responses.TemplateDetail, present.template_detail(value)),
    ):
        TypeAdapter(shape).validate_json(json.dumps(document), strict=True)


def test_log_lines_carry_what_the_command_line_needs() -> None:
    line = LogLine(datetime(2026, 1, 1, tzinfo=UTC), "warn", 'quote " and \x1b[31m')

    shown, entry = present.log_line(line), present.log_entry(line)

    inner = json.loads(shown["line"])
    assert inner["level"] == "warn"
    assert isinstance(inner["logger"], str)
    assert inner["message"] == line.message
    e2b.SandboxLogEntry.from_dict(entry)
    e2b.SandboxLogs.from_dict({"logs": [shown], "logEntries": [entry]})


SAMPLE = GuestMetrics(1_767_225_600, 2, 1.5, 4, 3, 2, 8, 7)


def test_a_metric_has_every_field() -> None:
    shown = present.metric(SAMPLE)

    parsed = e2b.SandboxMetric.from_dict(shown)
    assert (parsed.mem_total, parsed.mem_used, parsed.mem_cache) == (4, 3, 2)
    assert (parsed.disk_total, parsed.disk_used) == (8, 7)
    assert parsed.timestamp.timestamp() == parsed.timestamp_unix == 1_767_225_600


@pytest.mark.parametrize(
    "nonsense",
    [{"timestamp": 10**30}, {"timestamp": -(10**30)}, {"cpu_used_pct": float("nan")}, {"cpu_used_pct": float("inf")}],
)
def test_impossible_figures_of_a_guest_are_its_fault_and_not_ours(nonsense: dict[str, int]) -> None:
    with pytest.raises(Unavailable):
        present.metric(replace(SAMPLE, **nonsense))


def test_a_node_has_the_shape_of_agentenv(node: FakeNode, settings: ApiSettings) -> None:
    shown = present.node(node.info(), settings)

    TypeAdapter(responses.NodeShape).validate_json(json.dumps(shown), strict=True)
    assert set(shown) - {"sandboxErrorCount"} == {
        "id", "serviceInstanceID", "clusterID", "status", "version", "commit", "machineInfo", "sandboxCount",
        "sandboxStartingCount", "sandboxPausedCount", "createSuccesses", "createFails", "metrics",
    }  # fmt: skip
    assert set(shown["metrics"]) == {
        "allocatedCPU", "allocatedMemoryBytes", "cpuPercent", "cpuCount", "memoryUsedBytes", "memoryTotalBytes",
        "disks", "pausedAllocatedCPU", "pausedAllocatedMemoryBytes",
    }  # fmt: skip
