"""Every setting of a server: its type, limits, default and what it means. No I/O.

Names carry their unit. The reference page in docs is generated from here.
"""

from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints

from agentenv.model.limits import MAX_FORKS, MAX_TIMEOUT_S

API_KEY_PATTERN: Final = r"^[A-Za-z0-9._~-]{32,256}$"
SEED_PATTERN: Final = r"^[!-~]{16,256}$"
_DOMAIN_PATTERN: Final = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?$"
_NODE_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$"
_UUID_PATTERN: Final = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_DAY_S: Final = 86_400

Domain = Annotated[str, StringConstraints(pattern=_DOMAIN_PATTERN)]
Seconds = Annotated[float, Field(gt=0, le=_DAY_S, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the file: frozen, and refusing what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Server(Section):
    """Where the server listens, and under which names it is reached."""

    listen_host: str = Field(
        "127.0.0.1", min_length=1, max_length=255, description="Address to listen on; 0.0.0.0 or :: for every one."
    )
    listen_port: int = Field(8000, ge=0, le=65_535, description="TCP port; 0 lets the kernel choose one.")
    domains: tuple[Domain, ...] = Field(
        (),
        description="Domains whose {port}-{sandbox id} names lead here, each with a port if it is not the usual one. "
        "The first is told to clients.",
    )


class Paths(Section):
    """Where the server keeps things."""

    home: Path = Field(
        Path("/var/lib/aenv"),
        description="Records, secrets, images and snapshots; survives a reboot. "
        "The command line looks for the API key there, where its environment names it.",
    )
    runtime: Path = Field(
        Path("/run/aenv"),
        description="Sockets, namespaces and logs of running sandboxes. Short: a socket's path has at most 107 bytes.",
    )


class State(Section):
    """The database of records."""

    url: SecretStr | None = Field(
        None, description="sqlite+aiosqlite:///PATH; by default the file state/aenv.db in `paths.home`."
    )


class Vmm(Section):
    """The virtual machine monitor."""

    driver: Literal["qemu"] = Field("qemu", description="Which monitor runs the sandboxes.")
    qemu_binary: str = Field(
        "qemu-system-x86_64", min_length=1, max_length=4096, description="Name on the PATH, or path, of QEMU."
    )
    accelerator: Literal["auto", "kvm", "tcg"] = Field(
        "auto", description="auto uses KVM where a probe shows that it runs guests, else software emulation (tcg)."
    )
    tb_size_mib: int = Field(
        64, ge=8, le=1024, description="Cache of translated code in each sandbox under tcg, in MiB."
    )
    spares_high: int = Field(
        6,
        ge=0,
        le=64,
        description="VMMs kept started ahead of need, in all; 0 keeps none. Each takes a network slot and some memory.",
    )
    spares_low: int = Field(6, ge=0, le=64, description="With fewer of them waiting, more are started.")
    command_timeout_s: Seconds = Field(10.0, description="For a monitor to carry out one command, in s.")


class Storage(Section):
    """How disks and memory are kept."""

    backend: Literal["auto", "layered", "plain"] = Field(
        "auto",
        description="layered needs the storage daemon and /dev/fuse. auto goes on with what the home has data of, "
        "else it is layered where this host can; the log says why.",
    )
    daemon_binary: str = Field(
        "storaged",
        min_length=1,
        max_length=4096,
        description="Name on the PATH, or path, of the storage daemon; looked for beside the server's Python, too.",
    )


class Guest(Section):
    """What boots inside a sandbox."""

    image_dir: Path | None = Field(
        None, description="Directory of the guest kernel and initramfs; by default guest in `paths.home`."
    )
    ca_bundle: Path | None = Field(
        None,
        description="PEM file of certificates that guests trust beside their own (say, of a proxy that opens TLS).",
    )
    init_timeout_s: Seconds = Field(60.0, description="For the agent in a started or restored guest to answer, in s.")
    freeze_timeout_s: Seconds = Field(5.0, description="For the processes of a guest to stand still, in s.")


class Network(Section):
    """The slots of the sandboxes. Two servers on one host differ in prefix and both ranges."""

    name_prefix: str = Field(
        "aenv",
        # Linux allows 15 characters in a link's name, and ours end in a dash and up to five digits.
        pattern=r"^[a-z][a-z0-9]{0,8}$",
        description="Begins the name of every link, table and file of this server.",
    )
    address_cidr: IPv4Network = Field(
        IPv4Network("10.11.0.0/16"), description="Range of the addresses at which the host reaches the guests."
    )
    veth_cidr: IPv4Network = Field(
        IPv4Network("10.12.0.0/16"), description="Range of the links between host and sandboxes."
    )
    warm_low: int = Field(4, ge=0, le=10_000, description="With fewer free slots than this, more are made ahead.")
    warm_high: int = Field(16, ge=0, le=10_000, description="Free slots once more have been made.")
    max_slots: int | None = Field(None, ge=1, description="Most slots at a time; by default what the ranges hold.")
    always_denied: tuple[IPv4Network, ...] | None = Field(
        None,
        description="What no sandbox reaches, whatever its policy; by default every range that is not public. "
        "Multicast, broadcast and this server's own ranges always are.",
    )
    allow_private: tuple[IPv4Network, ...] = Field(
        (), description="Parts of `always_denied` that sandboxes may reach all the same (say, a package mirror)."
    )
    dns_upstreams: tuple[str, ...] = Field(
        (), description="Resolvers that answer for sandboxes, address or address:port; by default the host's."
    )
    dns_port: int = Field(10_053, ge=1, le=65_535, description="Port of the DNS forwarder, on an address of ours.")
    dns_timeout_s: float = Field(5.0, gt=0, le=60, description="For one DNS question in all, in s.")
    dns_in_flight: int = Field(2048, ge=1, le=65_536, description="Most unanswered DNS questions at a time.")
    dns_in_flight_per_slot: int = Field(128, ge=1, le=65_536, description="The same for one sandbox.")
    flows_per_slot: int = Field(8192, ge=16, description="Most tracked connections of one sandbox.")
    mtu: int | None = Field(
        None, ge=576, le=65_535, description="MTU of the links, in bytes; by default that of the host's default route."
    )


class Sandbox(Section):
    """Limits of sandboxes."""

    max_sandboxes: int = Field(
        1000, ge=1, le=1_000_000, description="Most sandboxes on this node, paused ones included."
    )
    max_timeout_s: int = Field(
        MAX_TIMEOUT_S, ge=1, le=MAX_TIMEOUT_S, description="Longest time to live that a request may ask for, in s."
    )
    min_free_disk_mib: int = Field(
        1024, ge=0, description="With less free disk than this no sandbox is started, in MiB."
    )
    auto_resume_min_timeout_s: int = Field(
        300, ge=1, le=MAX_TIMEOUT_S, description="Least time to live after traffic resumed a sandbox, in s."
    )
    fork_max: int = Field(MAX_FORKS, ge=1, le=MAX_FORKS, description="Most children of one fork.")
    operation_timeout_s: Seconds = Field(
        120.0, description="After this an operation (create, pause, resume, ...) has failed, in s."
    )


class Build(Section):
    """Builds of templates."""

    timeout_s: Seconds = Field(3600.0, description="How long a build may work, its upload and its waiting aside, in s.")
    max_running: int = Field(2, ge=1, le=1000, description="Most builds that work at a time.")
    max_waiting: int = Field(16, ge=0, le=10_000, description="Most that wait for that; one more is answered with 429.")


class Auth(Section):
    """The API key, and the seed of the tokens of all sandboxes."""

    api_key: SecretStr | None = Field(
        None, description="32 to 256 of A-Za-z0-9._~-; by default from a file, see `auth.api_key_file`."
    )
    api_key_file: Path | None = Field(
        None,
        description="By default /run/secrets/api-key if there is one, else secrets/api-key in `paths.home`, "
        "which is generated at the first start.",
    )
    token_seed: SecretStr | None = Field(
        None, description="16 to 256 printable characters; changing it invalidates the tokens of all sandboxes."
    )
    token_seed_file: Path | None = Field(
        None, description="By default secrets/token-seed in `paths.home`, generated at the first start."
    )


class Proxy(Section):
    """How traffic to sandboxes is carried."""

    connect_timeout_s: Seconds = Field(5.0, description="For a TCP connection to a guest, in s.")
    progress_timeout_s: Seconds = Field(
        30.0, description="How long neither side may stand still before an answer begins, in s."
    )
    continue_timeout_s: Seconds = Field(1.0, description="For a guest to answer Expect: 100-continue, in s.")
    wake_timeout_s: Seconds = Field(60.0, description="For a paused sandbox to run again, in s.")
    control_body_timeout_s: Seconds = Field(
        30.0, description="How long the body of an API request, or of its answer, may stand still, in s."
    )
    half_closed_timeout_s: Seconds = Field(
        60.0, description="Silence after which an upgraded connection of which one side has ended is cut, in s."
    )
    max_connections_per_sandbox: int = Field(4096, ge=1, le=65_536, description="Most connections to one sandbox.")
    max_idle_per_sandbox: int = Field(16, ge=0, le=65_536, description="Most that are kept open between requests.")
    max_idle_s: Seconds = Field(30.0, description="How long one is kept, in s.")
    max_idle_unsafe_s: Seconds = Field(
        1.0, description="How long one may have been idle to carry a request that must not be sent twice, in s."
    )
    sweep_interval_s: Seconds = Field(
        1.0, description="How often connections of stopped sandboxes are looked for, in s."
    )


class Log(Section):
    """What the server says about itself, on its standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is written.")
    format: Literal["auto", "pretty", "json"] = Field(
        "auto", description="auto is pretty on a terminal and JSON elsewhere."
    )


class Limits(Section):
    """How much one request may ask of the server."""

    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30, description="Longest body of an API request, in bytes.")
    body_timeout_s: Seconds = Field(30.0, description="For the body of an API request to arrive, in s.")
    max_connections: int = Field(
        16_384, ge=16, le=1_000_000, description="Most connections from clients; one more is answered with 503."
    )
    max_head_bytes: int = Field(
        65_536, ge=4096, le=1 << 20, description="Longest head (first line and headers) of a request, in bytes."
    )
    max_headers: int = Field(200, ge=16, le=10_000, description="Most headers of a request.")
    head_timeout_s: Seconds = Field(30.0, description="For the head of a request to arrive, in s.")
    keep_alive_s: Seconds = Field(75.0, description="How long a connection may be idle between requests, in s.")
    stop_timeout_s: Seconds = Field(
        10.0, description="How long requests under way may take when the server stops, in s."
    )


class Node(Section):
    """How this node is called."""

    id: Annotated[str, StringConstraints(pattern=_NODE_PATTERN)] | None = Field(
        None, description="By default the host's name."
    )
    cluster_id: Annotated[str, StringConstraints(pattern=_UUID_PATTERN)] = Field(
        "00000000-0000-0000-0000-000000000000", description="UUID, shown by GET /nodes."
    )
    service_instance_id: Annotated[str, StringConstraints(pattern=_UUID_PATTERN)] | None = Field(
        None, description="UUID, shown by GET /nodes; by default a new one at each start."
    )


class Debug(Section):
    """For tests of the server itself."""

    failpoints: str = Field("", max_length=4096, description="Failpoints to arm, such as pause.recorded=kill@2.")


class Settings(Section):
    """All sections."""

    server: Server = Server()
    paths: Paths = Paths()
    state: State = State()
    vmm: Vmm = Vmm()
    storage: Storage = Storage()
    guest: Guest = Guest()
    network: Network = Network()
    sandbox: Sandbox = Sandbox()
    build: Build = Build()
    auth: Auth = Auth()
    proxy: Proxy = Proxy()
    log: Log = Log()
    limits: Limits = Limits()
    node: Node = Node()
    debug: Debug = Debug()

    @property
    def database_path(self) -> Path:
        """Where the database is unless `state.url` says otherwise."""
        return self.paths.home / "state" / "aenv.db"

    @property
    def guest_dir(self) -> Path:
        return self.guest.image_dir or self.paths.home / "guest"
