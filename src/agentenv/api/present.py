"""From values of the model to what E2B's clients parse. Pure, and written by hand: a create spends nothing on it.

A public state is only ever ``running`` or ``paused``, since clients parse nothing else:

* whatever has a VM, gets one or is being copied while it runs is ``running``;
* whatever stands still is ``paused``, a sandbox in error too: it has no VM, pausing it
  again is a 409 that E2B's clients read as "was paused already", and connecting to it
  is a 409 that says why it cannot come back. It can be listed, read and deleted.

``lifecycleState`` gives the exact state, ``error`` the reason.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

from starlette.responses import Response

from agentenv.api.settings import ApiSettings
from agentenv.guest.contract import GuestMetrics
from agentenv.model.errors import Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Snapshot
from agentenv.node.contract import LogLine, NodeInfo, Tokens

Json: TypeAlias = dict[str, Any]
PublicState: TypeAlias = Literal["running", "paused"]

# `endAt` is required, and a paused sandbox has no end.
NO_END: Final = timedelta(days=36_500)
_STANDING: Final = frozenset({State.PAUSING, State.PAUSED, State.ERROR})


def json_response(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    encoded = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return Response(encoded, status, headers, media_type="application/json")


def no_content() -> Response:
    return Response(status_code=204)


def timestamp(instant: datetime) -> str:
    """RFC 3339 in UTC with milliseconds: ``2026-01-02T03:04:05.678Z``."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def public_state(state: State) -> PublicState:
    return "paused" if state in _STANDING else "running"


def sandbox(value: Sandbox, tokens: Tokens, settings: ApiSettings) -> Json:
    """What create, connect, resume and fork answer."""
    document: Json = {
        "templateID": value.template_id,
        "sandboxID": value.id,
        "clientID": "",
        "envdVersion": value.envd_version,
        "trafficAccessToken": tokens.traffic,
        "domain": settings.domain,
    }
    if value.template_name is not None:
        document["alias"] = value.template_name
    if tokens.envd is not None:
        document["envdAccessToken"] = tokens.envd
    return document


def listed_sandbox(value: Sandbox) -> Json:
    document: Json = {
        "templateID": value.template_id,
        "sandboxID": value.id,
        "clientID": "",
        "startedAt": timestamp(value.created_at),
        "endAt": timestamp(value.ends_at or value.created_at + NO_END),
        "cpuCount": value.machine.vcpu_count,
        "memoryMB": value.machine.memory_mib,
        "diskSizeMB": value.machine.disk_mib,
        "state": public_state(value.state),
        "envdVersion": value.envd_version,
        "metadata": dict(value.metadata),
        "lifecycleState": value.state.value,
    }
    if value.template_name is not None:
        document["alias"] = value.template_name
    if value.state is State.ERROR:
        document["error"] = {"reason": value.reason or "unknown"}
    return document


def sandbox_detail(value: Sandbox, tokens: Tokens, settings: ApiSettings) -> Json:
    document = listed_sandbox(value)
    document["allowInternetAccess"] = value.egress.allow_internet
    document["domain"] = settings.domain
    document["lifecycle"] = {"autoResume": value.auto_resume, "onTimeout": value.on_timeout.value}
    if tokens.envd is not None:
        document["envdAccessToken"] = tokens.envd
    if (shown := network(value.egress, value.ingress)) is not None:
        document["network"] = shown
    if value.state is State.PAUSED:
        document["pauseMode"] = "full"
    return document


def network(egress: EgressPolicy, ingress: IngressPolicy) -> Json | None:
    """None where nobody has chosen anything."""
    if not egress.allow_out and not egress.deny_out and ingress == IngressPolicy():
        return None
    document: Json = {
        "allowPublicTraffic": ingress.allow_public_traffic,
        "allowOut": [str(one) for one in egress.allow_out],
        "denyOut": [str(one) for one in egress.deny_out],
    }
    if ingress.mask_request_host is not None:
        document["maskRequestHost"] = ingress.mask_request_host
    return document


def metric(value: GuestMetrics) -> Json:
    """Raises `Unavailable` for figures that cannot be: whoever is root in a guest can make its agent say anything."""
    try:
        at = timestamp(datetime.fromtimestamp(value.timestamp, UTC))
    except (ValueError, OverflowError, OSError):
        raise Unavailable("the agent of the sandbox reports an impossible time") from None
    if not math.isfinite(value.cpu_used_pct):
        raise Unavailable("the agent of the sandbox reports an impossible CPU use")
    return {
        "timestamp": at,
        "timestampUnix": value.timestamp,
        "cpuCount": value.cpu_count,
        "cpuUsedPct": value.cpu_used_pct,
        "memUsed": value.memory_used,
        "memTotal": value.memory_total,
        "memCache": value.memory_cache,
        "diskUsed": value.disk_used,
        "diskTotal": value.disk_total,
    }


def log_line(value: LogLine) -> Json:
    """E2B's command line parses ``line`` as JSON and needs ``level`` and ``logger`` in it."""
    at = timestamp(value.timestamp)
    inner = {"timestamp": at, "level": value.level, "logger": "console", "message": value.message}
    return {"timestamp": at, "line": json.dumps(inner)}


def log_entry(value: LogLine) -> Json:
    return {
        "timestamp": timestamp(value.timestamp),
        "message": value.message,
        "level": value.level,
        "fields": {"logger": "console"},
    }


def snapshot(value: Snapshot) -> Json:
    return {
        "snapshotID": value.id,
        "names": list(value.names),
        "cpuCount": value.machine.vcpu_count,
        "memoryMB": value.machine.memory_mib,
        "diskSizeMB": value.machine.disk_mib,
        "createdAt": timestamp(value.created_at),
        "updatedAt": timestamp(value.created_at),
    }


def template(value: Snapshot) -> Json:
    at = timestamp(value.created_at)
    return {
        "templateID": value.id,
        "buildID": value.id,
        "cpuCount": value.machine.vcpu_count,
        "memoryMB": value.machine.memory_mib,
        "diskSizeMB": value.machine.disk_mib,
        "public": False,
        "aliases": list(value.names),
        "names": list(value.names),
        "createdAt": at,
        "updatedAt": at,
        "createdBy": None,
        "lastSpawnedAt": timestamp(value.last_spawned_at) if value.last_spawned_at is not None else None,
        "spawnCount": value.spawn_count,
        "buildCount": 1,
        "envdVersion": value.envd_version,
        "buildStatus": "ready",
    }


def template_detail(value: Snapshot) -> Json:
    at = timestamp(value.created_at)
    build = {
        "buildID": value.id,
        "status": "ready",
        "createdAt": at,
        "updatedAt": at,
        "finishedAt": at,
        "cpuCount": value.machine.vcpu_count,
        "memoryMB": value.machine.memory_mib,
        "diskSizeMB": value.machine.disk_mib,
        "envdVersion": value.envd_version,
    }
    return template(value) | {"builds": [build]}


def node(value: NodeInfo, settings: ApiSettings) -> Json:
    return {
        "id": value.id,
        "serviceInstanceID": settings.service_instance_id,
        "clusterID": settings.cluster_id,
        "status": value.status,
        "version": value.version,
        "commit": settings.commit,
        "machineInfo": {
            "cpuFamily": value.cpu_family,
            "cpuModel": value.cpu_model,
            "cpuModelName": value.cpu_model_name,
            "cpuArchitecture": value.cpu_architecture,
        },
        "sandboxCount": value.running,
        "sandboxStartingCount": value.starting,
        "sandboxPausedCount": value.paused,
        "sandboxErrorCount": value.errored,
        "createSuccesses": value.create_successes,
        "createFails": value.create_fails,
        "metrics": {
            "allocatedCPU": value.allocated_cpu,
            "allocatedMemoryBytes": value.allocated_memory_bytes,
            "cpuPercent": value.cpu_percent,
            "cpuCount": value.cpu_count,
            "memoryUsedBytes": value.memory_used_bytes,
            "memoryTotalBytes": value.memory_total_bytes,
            "disks": [
                {
                    "mountPoint": disk.mount_point,
                    "device": disk.device,
                    "filesystemType": disk.filesystem,
                    "usedBytes": disk.used_bytes,
                    "totalBytes": disk.total_bytes,
                }
                for disk in value.disks
            ],
            "pausedAllocatedCPU": value.paused_allocated_cpu,
            "pausedAllocatedMemoryBytes": value.paused_allocated_memory_bytes,
        },
    }
