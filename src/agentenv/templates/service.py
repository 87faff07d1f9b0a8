"""Builds at work: each in a task of its own, one at a time for each name."""

import uuid
from pathlib import Path

from agentenv.model.snapshot import Snapshot
from agentenv.node.host import Host
from agentenv.templates.build import build, check
from agentenv.templates.contract import BuildSpec, Progress


class TemplateBuilder:
    """See `agentenv.templates.contract.Builder`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def check(self, spec: BuildSpec) -> None:
        check(spec)

    async def build(self, spec: BuildSpec, archive: Path, progress: Progress) -> Snapshot:
        """A client that hangs up leaves the build going; a second one of the same name waits its turn."""
        check(spec)
        return await self._host.operations.run(
            f"build {spec.name}", f"build {uuid.uuid4()}", lambda: build(self._host, spec, archive, progress)
        )
