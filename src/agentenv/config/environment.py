"""Every environment variable that any part of the product reads, with what it is for.

A setting ``section.key`` has the variable ``AENV_SECTION_KEY``. Beside those there
are the short names of the published AgentENV, the names the command line reads to
find a server, and those of the build and test tools.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentenv.config.fields import settings_by_name

PREFIX: Final = "AENV_"
CONFIG_PATH: Final = "AENV_CONFIG_PATH"
LISTEN: Final = "API_ADDR"


@dataclass(frozen=True, slots=True)
class Variable:
    """``setting`` is the dotted name of what it sets, None if it is not a setting."""

    name: str
    help: str
    setting: str | None = None


ALIASES: Final = (
    Variable("AENV_API_KEY", "the API key", "auth.api_key"),
    Variable("AENV_SANDBOX_ACCESS_TOKEN_HASH_SEED", "the seed of sandbox tokens", "auth.token_seed"),
    Variable("AENV_SANDBOX_PROXY_DOMAINS", "domains of sandboxes, separated by commas", "server.domains"),
    Variable("AENV_HOME_PATH", "the home directory; the command line looks for the API key there", "paths.home"),
    Variable("AENV_RUNTIME_PATH", "the runtime directory", "paths.runtime"),
    Variable("AENV_CLUSTER_ID", "the UUID of the cluster", "node.cluster_id"),
    Variable("AENV_SERVICE_INSTANCE_ID", "the UUID of this run of the server", "node.service_instance_id"),
    Variable("AENV_FAILPOINTS", "failpoints to arm, in tests of the server", "debug.failpoints"),
)

SPECIAL: Final = (
    Variable(CONFIG_PATH, "the configuration file; by default /etc/aenv/config.toml, if there is one"),
    Variable(LISTEN, "HOST:PORT to listen on, in one; sets `server.listen_host` and `server.listen_port`"),
)

CLIENT: Final = (
    Variable("AENV_API_URL", "command line: the URL of the server"),
    Variable("E2B_API_URL", "command line: the same, under the name E2B's SDKs read"),
    Variable("E2B_API_KEY", "command line: the API key, under the name E2B's SDKs read"),
)

TOOLS: Final = (
    Variable("AENV_REQUIRE", "tests: capabilities whose lack is a failure and not a skip"),
    Variable("AENV_QEMU", "tests: the QEMU to use"),
    Variable("AENV_ENVD", "tests: the guest agent to use"),
    Variable("AENV_GUEST_DIR", "tests: the directory of the guest kernel and initramfs"),
    Variable("AENV_BASE_ROOTFS", "tests: the root file system of the default template"),
)

WITHOUT_EFFECT: Final = frozenset(
    {
        "AENV_CUSTOM_EXTENSION_URL",
        "AENV_DEPS_PATH",
        "AENV_FIRECRACKER_SERIAL_DIR",
        "AENV_FIRECRACKER_WORK_DIR",
        "AENV_FORCE_SYSCTL_TUNING",
        "AENV_LOG_SPAN_EVENTS",
        "AENV_OBSERVABILITY_REPORT_INTERVAL_SECS",
        "AENV_OBSERVABILITY_SCHEDULER_ENDPOINT",
        "AENV_OBSERVABILITY_SCHEDULER_REPORT_ENABLED",
        "AENV_PERSISTED_SANDBOX_STORE_PATH",
        "AENV_SNAPSHOT_LOCAL_CACHE_PATH",
        "AENV_SNAPSHOT_STORE",
        "AENV_UBLK_DAEMON_BINARY_PATH",
        "AENV_UBLK_DAEMON_METRICS_LISTEN_ADDR",
        "AENV_VIRTUALIZATION_MODE",
    }
)
"""Names that the published AgentENV reads and this one has no use for: said once at start, not refused."""

# Kubernetes tells every container about its services, and one may well be called "aenv".
_KUBERNETES: Final = re.compile(
    r"_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$"
)
_KUBERNETES_LINK: Final = re.compile(r"(tcp|udp|sctp)(://.*)?|[0-9a-fA-F.:]+")


def variables() -> Mapping[str, Variable]:
    """Every variable by its name; those that set something, first."""
    own = [
        Variable(f"{PREFIX}{setting.section}_{setting.key}".upper(), setting.description, setting.name)
        for setting in settings_by_name().values()
    ]
    return {variable.name: variable for variable in (*own, *ALIASES, *SPECIAL, *CLIENT, *TOOLS)}


def is_kubernetes_link(name: str, value: str) -> bool:
    return bool(_KUBERNETES.search(name) and _KUBERNETES_LINK.fullmatch(value))
