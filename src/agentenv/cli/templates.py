"""Commands on templates and snapshots."""

import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from typer.core import TyperGroup

from agentenv.cli.client import USAGE, CliError, told
from agentenv.cli.context import client_of
from agentenv.cli.delete import delete_each
from agentenv.cli.output import for_people, out, print_json, progress_bar, show, working
from agentenv.cli.sandboxes import Json, Quiet, SandboxId, complete_template
from agentenv.model.limits import DISK_MIB, MEMORY_MIB, VCPU_COUNT

TEMPLATE_COLUMNS = (
    ("NAME", "names"),
    ("TEMPLATE", "templateID"),
    ("CPU", "cpuCount"),
    ("MIB", "memoryMB"),
    ("DISK MIB", "diskSizeMB"),
    ("CREATED", "createdAt"),
    ("STARTED", "spawnCount"),
)
SNAPSHOT_COLUMNS = (("NAME", "names"), ("SNAPSHOT", "snapshotID"))
CHUNK_BYTES = 1 << 20

templates = typer.Typer(help="Templates: what sandboxes start from.", no_args_is_help=True)


class CreateByDefault(TyperGroup):
    """`aenv snapshot ID` is `aenv snapshot create ID`: what people type first."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["create", *args]
        return super().resolve_command(ctx, args)


snapshots = typer.Typer(help="Snapshots: kept states of sandboxes.", no_args_is_help=True, cls=CreateByDefault)


@templates.command("build")
def build(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the template.")],
    rootfs: Annotated[Path, typer.Option(help="Root filesystem: a directory, or a tar (gzip, xz, zstd or plain).")],
    cpu: Annotated[
        int, typer.Option(min=VCPU_COUNT.low, max=VCPU_COUNT.high, help="Virtual CPUs.")
    ] = VCPU_COUNT.default,
    memory: Annotated[
        int, typer.Option(min=MEMORY_MIB.low, max=MEMORY_MIB.high, help="Memory in MiB.")
    ] = MEMORY_MIB.default,
    disk: Annotated[int, typer.Option(min=DISK_MIB.low, max=DISK_MIB.high, help="Disk in MiB.")] = DISK_MIB.default,
    user: Annotated[str, typer.Option(help="Default user of commands; made if it is missing.")] = "user",
    init: Annotated[str | None, typer.Option(help="The image's own init, to run as PID 1.")] = None,
) -> None:
    """Build a template from a root filesystem and take its snapshot."""
    if not rootfs.exists():
        raise CliError(f"{rootfs} does not exist", code=USAGE)
    params = {"name": name, "cpuCount": cpu, "memoryMB": memory, "diskSizeMB": disk, "defaultUser": user}
    if init is not None:
        params["init"] = init
    content = _tar_of(rootfs) if rootfs.is_dir() else _file(rootfs)
    template: dict[str, Any] | None = None
    with progress_bar() as bar:
        task = bar.add_task("sending the root filesystem", total=None)
        headers = {"Content-Type": "application/x-tar"}
        with client_of(context).stream(
            "POST", "templates", "rootfs", params=params, content=content, headers=headers
        ) as answer:
            for line in answer.iter_lines():
                event = json.loads(line)
                if "error" in event:
                    message, hint = told(event["error"])
                    raise CliError(message, hint=hint)
                template = event.get("template", template)
                if message := event.get("message"):
                    bar.update(task, description=escape(message), completed=event.get("done"), total=event.get("total"))
                    if event.get("done") is None:
                        bar.console.print(f"{event['step']:9} {message}", highlight=False, markup=False)
    if template is None:
        raise CliError("the server closed the connection before the build was over")
    if for_people():
        out.print(template["templateID"], highlight=False)
    else:
        print_json(template)


@templates.command("list")
@templates.command("ls", hidden=True)
def list_templates(context: typer.Context, as_json: Json = False) -> None:
    """List templates."""
    show(client_of(context).pages("v2", "templates"), TEMPLATE_COLUMNS, as_json=as_json)


@templates.command("delete")
@templates.command("rm", hidden=True)
def delete_template(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(help="Names or ids.", autocompletion=complete_template, show_default=False)
    ],
) -> None:
    """Delete templates or snapshots; sandboxes made from them live on."""
    delete_each(client_of(context), "templates", names)


@snapshots.command("create")
def create_snapshot(
    context: typer.Context,
    sandbox_id: SandboxId,
    name: Annotated[str | None, typer.Option(help="A name to start it by.")] = None,
    quiet: Quiet = False,
) -> None:
    """Keep the live state of a sandbox, which runs on.

    Prints the snapshot's id; when piped, all about it as JSON, unless -q.
    """
    with working("taking a snapshot"):
        made = client_of(context).call_running("POST", sandbox_id, "snapshots", json={"name": name} if name else {})
    if quiet or for_people():
        print(made["snapshotID"])
    else:
        print_json(made)


@snapshots.command("list")
@snapshots.command("ls", hidden=True)
def list_snapshots(
    context: typer.Context,
    sandbox: Annotated[str | None, typer.Option(help="Only those taken of this sandbox.")] = None,
    as_json: Json = False,
) -> None:
    """List snapshots."""
    params = {"sandboxID": sandbox} if sandbox else None
    show(client_of(context).pages("snapshots", params=params), SNAPSHOT_COLUMNS, as_json=as_json)


snapshots.command("delete")(delete_template)
snapshots.command("rm", hidden=True)(delete_template)


def _file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _tar_of(directory: Path) -> Iterator[bytes]:
    """A tar of *directory* as it is made; the reader sets the pace."""
    chunks: Queue[bytes | Exception | None] = Queue(maxsize=8)

    class Sink:
        def write(self, data: bytes) -> int:
            chunks.put(data)
            return len(data)

    def pack() -> None:
        try:
            sink = cast("Any", Sink())
            with tarfile.open(fileobj=sink, mode="w|", bufsize=CHUNK_BYTES, format=tarfile.PAX_FORMAT) as tar:
                tar.add(directory, arcname=".")
            chunks.put(None)
        except (OSError, tarfile.TarError) as error:
            chunks.put(error)

    threading.Thread(target=pack, daemon=True).start()
    while (chunk := chunks.get()) is not None:
        if isinstance(chunk, Exception):
            raise CliError(f"{directory} cannot be read: {chunk}")
        yield chunk
