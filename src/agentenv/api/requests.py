"""What clients may send, per operation, and how it becomes a request of the model.

Both generations of E2B's paths share these, with their own defaults: 15 s to live on
v1, 300 s on v2. `autoPause` is off and `secure` is on unless the caller says otherwise.
"""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from agentenv.api.body import Wire
from agentenv.api.fields import (
    MAX_REFRESH_S,
    Destinations,
    Environment,
    MaskHost,
    Metadata,
    MustKeepMemory,
    NoExtension,
    NoList,
    NoObject,
    Reference,
    SnapshotName,
    Timeout,
)
from agentenv.model.errors import Invalid
from agentenv.model.limits import MAX_FORKS
from agentenv.model.policy import EgressPolicy, IngressPolicy
from agentenv.model.sandbox import CreateSandbox, OnTimeout


class AutoResume(Wire):
    enabled: bool = Field(description="Traffic through the proxy wakes the sandbox when it is paused.")


class Egress(Wire):
    """What both a new sandbox and a change of its network may say about the way out."""

    allow_out: Destinations = Field([], alias="allowOut", description="Reachable; wins over `denyOut`.")
    deny_out: Destinations = Field([], alias="denyOut", description="Not reachable; `0.0.0.0/0` is everything.")
    dns_servers: NoList = Field([], alias="dnsServers", description="Not supported: must be empty.")
    egress_proxy: NoObject | None = Field(None, alias="egressProxy", description="Not supported: must be null.")
    rules: NoObject = Field({}, description="Not supported: must be empty.")

    def policy(self, *internet: bool | None) -> EgressPolicy:
        """With *internet* as the two spellings of the same field gave it. Raises `Invalid` if they disagree."""
        given = {one for one in internet if one is not None}
        if len(given) > 1:
            raise Invalid("allow_internet_access and allowInternetAccess disagree")
        return EgressPolicy(
            allow_internet=next(iter(given), None),
            allow_out=tuple(dict.fromkeys(self.allow_out)),
            deny_out=tuple(dict.fromkeys(self.deny_out)),
        )


class Network(Egress):
    allow_public_traffic: bool | None = Field(
        None,
        alias="allowPublicTraffic",
        description="Whether the ports of the sandbox answer without its traffic token; null means true.",
    )
    mask_request_host: MaskHost | None = Field(None, alias="maskRequestHost")
    https_ports: NoList = Field([], alias="httpsPorts", description="Not supported: must be empty.")

    def ingress(self) -> IngressPolicy:
        return IngressPolicy(
            allow_public_traffic=self.allow_public_traffic is not False, mask_request_host=self.mask_request_host
        )


class NetworkUpdate(Egress):
    """Replaces the whole egress policy: what is left out is cleared. Ingress stays as it is."""

    allow_internet_access: bool | None = Field(None, description="False: nothing but `allowOut` is reachable.")
    allow_internet_access_camel: bool | None = Field(None, alias="allowInternetAccess", description="The same.")

    def egress(self) -> EgressPolicy:
        return self.policy(self.allow_internet_access, self.allow_internet_access_camel)


class Iam(Wire):
    tokens: NoObject = Field({})


class NewSandboxBase(Wire):
    template_id: Reference = Field(alias="templateID", description="Id or name of a template or snapshot.")
    metadata: Metadata = Field({})
    env_vars: Environment = Field({}, alias="envVars")
    auto_pause: bool = Field(False, alias="autoPause", description="At its time-out, pause instead of kill.")
    auto_pause_memory: MustKeepMemory = Field(True, alias="autoPauseMemory", description="Only true is supported.")
    auto_resume: AutoResume | None = Field(None, alias="autoResume")
    allow_internet_access: bool | None = Field(None, description="False: nothing but `allowOut` is reachable.")
    allow_internet_access_camel: bool | None = Field(None, alias="allowInternetAccess", description="The same.")
    network: Network = Network()
    mcp: dict[str, Any] | None = Field(None, description="Accepted and not used: the client starts MCP itself.")
    iam: Iam | None = Field(None, description="Workload identity. Not supported: no tokens may be given.")
    volume_mounts: NoList = Field([], alias="volumeMounts", description="Not supported: must be empty.")
    custom_extension_params: NoExtension = Field({}, alias="customExtensionParams")

    def to_model(self, *, timeout_s: int, secure: bool) -> CreateSandbox:
        """Raises `Invalid` where two fields contradict each other."""
        return CreateSandbox(
            template=self.template_id,
            timeout_s=timeout_s,
            on_timeout=OnTimeout.PAUSE if self.auto_pause else OnTimeout.KILL,
            auto_resume=self.auto_resume is not None and self.auto_resume.enabled,
            secure=secure,
            metadata=self.metadata,
            env=self.env_vars,
            egress=self.network.policy(self.allow_internet_access, self.allow_internet_access_camel),
            ingress=self.network.ingress(),
        )


class NewSandbox(NewSandboxBase):
    timeout: Timeout = 15
    secure: bool = Field(True, description="Whether the agent in the sandbox asks for `envdAccessToken`.")


class NewSandboxV2(NewSandboxBase):
    timeout: Timeout = 300
    secure: bool = Field(True, description="Always true, whatever is given.")


class Connect(Wire):
    timeout: Timeout = 15
    memory: MustKeepMemory = Field(True, description="Only true is supported.")


class ConnectV2(Wire):
    timeout: Timeout = 300
    memory: MustKeepMemory = Field(True, description="Only true is supported.")


class Resume(Wire):
    timeout: Timeout = 15
    auto_pause: bool | None = Field(None, alias="autoPause", description="Left out: as it was.")
    memory: MustKeepMemory = Field(True, description="Only true is supported.")


class Pause(Wire):
    memory: MustKeepMemory = Field(True, description="Only true is supported.")
    require_healthy_guest: bool = Field(
        False, alias="requireHealthyGuest", description="Refuse with 503 if the agent in the sandbox does not answer."
    )


class SetTimeout(Wire):
    timeout: Timeout


class Refresh(Wire):
    duration: Annotated[int, Field(ge=0, le=MAX_REFRESH_S, description="At least so many seconds from now.")] = 15


class Fork(Wire):
    timeout: Timeout = 15
    count: Annotated[int, Field(ge=1, le=MAX_FORKS, description="How many children.")] = 1


class TakeSnapshot(Wire):
    name: SnapshotName | None = Field(None, description="A name in use moves to the new snapshot.")
    memory: MustKeepMemory = Field(True, description="Only true is supported.")


class ExtensionParams(Wire):
    """An opaque object for the configured extension; none is, so only ``{}`` is accepted."""

    model_config = ConfigDict(extra="allow")
