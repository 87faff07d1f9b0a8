"""What clients get, as documented shapes. They describe; `present` writes the bytes, and tests hold the two together.

Names and units are E2B's: ``memoryMB`` and ``diskSizeMB`` are MiB, times are RFC 3339
in UTC. What E2B does not have is marked as an extension of AgentENV.
"""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """Base of answers. Clients must expect fields that they do not know."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)


class Error(Shape):
    """Every answer that is not a 2xx."""

    code: int = Field(description="The HTTP status.", examples=[404])
    message: str = Field(examples=["no such sandbox"])
    error_code: str = Field(description="What kind of error it is; messages may change, this does not.")
    hint: str | None = Field(None, description="What may be done about it; absent if there is nothing to say.")


class SandboxShape(Shape):
    template_id: str = Field(alias="templateID")
    sandbox_id: UUID = Field(alias="sandboxID")
    client_id: Literal[""] = Field(alias="clientID")
    envd_version: str = Field(alias="envdVersion", examples=["0.6.1"])
    alias: str | None = Field(None, description="Name of the template; absent if it has none.")
    envd_access_token: str | None = Field(
        None, alias="envdAccessToken", description="For `X-Access-Token`; absent unless the sandbox is secure."
    )
    traffic_access_token: str | None = Field(
        alias="trafficAccessToken", description="For `e2b-traffic-access-token`; null while ports are public."
    )
    domain: str | None


class ErrorReason(Shape):
    reason: str


class ListedSandbox(Shape):
    template_id: str = Field(alias="templateID")
    sandbox_id: UUID = Field(alias="sandboxID")
    client_id: Literal[""] = Field(alias="clientID")
    started_at: datetime = Field(alias="startedAt", description="When it was created; a resume does not change it.")
    end_at: datetime = Field(alias="endAt", description="When its time runs out; a century on if it has no end now.")
    cpu_count: int = Field(alias="cpuCount")
    memory_mib: int = Field(alias="memoryMB", description="MiB")
    disk_mib: int = Field(alias="diskSizeMB", description="MiB")
    state: Literal["running", "paused"] = Field(description="A sandbox in error counts as paused: it has no VM.")
    envd_version: str = Field(alias="envdVersion")
    alias: str | None = None
    metadata: dict[str, str]
    lifecycle_state: str = Field(alias="lifecycleState", description="Extension: the exact state.")
    error: ErrorReason | None = Field(None, description="Extension: why it is in error; absent otherwise.")


class NetworkShape(Shape):
    allow_public_traffic: bool = Field(alias="allowPublicTraffic")
    allow_out: list[str] = Field(alias="allowOut")
    deny_out: list[str] = Field(alias="denyOut")
    mask_request_host: str | None = Field(None, alias="maskRequestHost")


class Lifecycle(Shape):
    auto_resume: bool = Field(alias="autoResume")
    on_timeout: Literal["kill", "pause"] = Field(alias="onTimeout")


class SandboxDetail(ListedSandbox):
    envd_access_token: str | None = Field(None, alias="envdAccessToken")
    allow_internet_access: bool | None = Field(alias="allowInternetAccess", description="Null: not chosen.")
    domain: str | None
    network: NetworkShape | None = Field(None, description="Absent while everything is at its default.")
    lifecycle: Lifecycle
    pause_mode: Literal["full"] | None = Field(None, alias="pauseMode", description="Present while paused.")


class ForkResult(Shape):
    """One child of a fork: exactly one of the two."""

    sandbox: SandboxShape | None = None
    error: Error | None = None


class Metric(Shape):
    timestamp: datetime
    timestamp_unix: int = Field(alias="timestampUnix")
    cpu_count: int = Field(alias="cpuCount")
    cpu_used_pct: float = Field(alias="cpuUsedPct", description="Per cent of all its CPUs.")
    mem_used: int = Field(alias="memUsed", description="bytes")
    mem_total: int = Field(alias="memTotal", description="bytes")
    mem_cache: int = Field(alias="memCache", description="bytes")
    disk_used: int = Field(alias="diskUsed", description="bytes")
    disk_total: int = Field(alias="diskTotal", description="bytes")


class ManyMetrics(Shape):
    sandboxes: dict[str, Metric]


class LogLineShape(Shape):
    timestamp: datetime
    line: str = Field(description="A JSON object with `timestamp`, `level`, `logger` and `message`.")


class LogEntry(Shape):
    timestamp: datetime
    message: str
    level: Literal["debug", "info", "warn", "error"]
    fields: dict[str, str]


class Logs(Shape):
    logs: list[LogLineShape]
    log_entries: list[LogEntry] = Field(alias="logEntries")


class LogsV2(Shape):
    logs: list[LogEntry]


class SnapshotShape(Shape):
    snapshot_id: UUID = Field(alias="snapshotID")
    names: list[str]
    cpu_count: int = Field(alias="cpuCount")
    memory_mib: int = Field(alias="memoryMB", description="MiB")
    disk_mib: int = Field(alias="diskSizeMB", description="MiB")
    created_at: datetime = Field(alias="createdAt")
    updated_at: datetime = Field(alias="updatedAt")


class TemplateShape(Shape):
    template_id: UUID = Field(alias="templateID")
    build_id: UUID = Field(alias="buildID", description="The same as the template: each has one build.")
    cpu_count: int = Field(alias="cpuCount")
    memory_mib: int = Field(alias="memoryMB", description="MiB")
    disk_mib: int = Field(alias="diskSizeMB", description="MiB")
    public: Literal[False]
    aliases: list[str]
    names: list[str]
    created_at: datetime = Field(alias="createdAt")
    updated_at: datetime = Field(alias="updatedAt")
    created_by: None = Field(alias="createdBy")
    last_spawned_at: datetime | None = Field(alias="lastSpawnedAt")
    spawn_count: int = Field(alias="spawnCount")
    build_count: Literal[1] = Field(alias="buildCount")
    envd_version: str = Field(alias="envdVersion")
    build_status: Literal["ready"] = Field(alias="buildStatus")


class Build(Shape):
    build_id: UUID = Field(alias="buildID")
    status: Literal["ready"]
    created_at: datetime = Field(alias="createdAt")
    updated_at: datetime = Field(alias="updatedAt")
    finished_at: datetime = Field(alias="finishedAt")
    cpu_count: int = Field(alias="cpuCount")
    memory_mib: int = Field(alias="memoryMB", description="MiB")
    disk_mib: int = Field(alias="diskSizeMB", description="MiB")
    envd_version: str = Field(alias="envdVersion")


class TemplateDetail(TemplateShape):
    builds: list[Build]


class BuildStatus(Shape):
    template_id: UUID = Field(alias="templateID")
    build_id: UUID = Field(alias="buildID")
    status: Literal["ready"]
    logs: list[str]
    log_entries: list[LogEntry] = Field(alias="logEntries")


class AliasShape(Shape):
    template_id: UUID = Field(alias="templateID")
    public: Literal[False]


class Tag(Shape):
    tag: Literal["default"]
    build_id: UUID = Field(alias="buildID")
    created_at: datetime = Field(alias="createdAt")


class Disk(Shape):
    mount_point: str = Field(alias="mountPoint")
    device: str
    filesystem_type: str = Field(alias="filesystemType")
    used_bytes: int = Field(alias="usedBytes")
    total_bytes: int = Field(alias="totalBytes")


class NodeMetrics(Shape):
    allocated_cpu: int = Field(alias="allocatedCPU")
    allocated_memory_bytes: int = Field(alias="allocatedMemoryBytes")
    cpu_percent: float = Field(alias="cpuPercent")
    cpu_count: int = Field(alias="cpuCount")
    memory_used_bytes: int = Field(alias="memoryUsedBytes")
    memory_total_bytes: int = Field(alias="memoryTotalBytes")
    disks: list[Disk]
    paused_allocated_cpu: int = Field(alias="pausedAllocatedCPU")
    paused_allocated_memory_bytes: int = Field(alias="pausedAllocatedMemoryBytes")


class MachineInfo(Shape):
    cpu_family: str = Field(alias="cpuFamily")
    cpu_model: str = Field(alias="cpuModel")
    cpu_model_name: str = Field(alias="cpuModelName")
    cpu_architecture: str = Field(alias="cpuArchitecture")


class NodeShape(Shape):
    id: str
    service_instance_id: str = Field(alias="serviceInstanceID")
    cluster_id: str = Field(alias="clusterID")
    status: Literal["ready", "draining", "connecting", "unhealthy"]
    version: str
    commit: str
    machine_info: MachineInfo = Field(alias="machineInfo")
    sandbox_count: int = Field(alias="sandboxCount", description="Running ones.")
    sandbox_starting_count: int = Field(alias="sandboxStartingCount")
    sandbox_paused_count: int = Field(alias="sandboxPausedCount")
    sandbox_error_count: int = Field(alias="sandboxErrorCount", description="Extension.")
    create_successes: int = Field(alias="createSuccesses")
    create_fails: int = Field(alias="createFails")
    metrics: NodeMetrics


class NodeDetail(NodeShape):
    cached_builds: Annotated[list[Any], Field(max_length=0)] = Field(alias="cachedBuilds")


class Team(Shape):
    team_id: str = Field(alias="teamID")
    name: str
    api_key: str = Field(alias="apiKey", description="The key that the request was made with.")
    is_default: Literal[True] = Field(alias="isDefault")
