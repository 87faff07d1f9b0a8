"""What a sandbox reports about itself: its metrics now, and the last lines of its console."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import Query
from starlette.responses import Response

from agentenv.api import present, queries
from agentenv.api.endpoints import Answer, Endpoints
from agentenv.api.responses import Logs, LogsV2, ManyMetrics, Metric
from agentenv.model.errors import AgentEnvError
from agentenv.model.lifecycle import State
from agentenv.node.contract import LogLine, Node

_CONCURRENT: Final = 16
_KEPT_LINES: Final = 10_000  # looked through when lines are chosen by more than "the last ones"
_LEVELS: Final = ("debug", "info", "warn", "error")


class TelemetryRoutes:
    """Reads sandboxes of *node*."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def declare(self, endpoints: Endpoints) -> None:
        endpoints.add(
            "GET", "/sandboxes/metrics", self.many_metrics,
            Answer(200, ManyMetrics, "Without those that do not run or do not answer."),
            tag="telemetry", summary="Read the metrics of several sandboxes", problems=(400,),
        )  # fmt: skip
        endpoints.add(
            "GET", "/sandboxes/{sandbox_id}/metrics", self.metrics,
            Answer(200, list[Metric], "One sample, of now; none if it does not run or now is not asked for."),
            tag="telemetry", summary="Read the metrics of a sandbox", problems=(400, 404, 503),
        )  # fmt: skip
        endpoints.add(
            "GET", "/sandboxes/{sandbox_id}/logs", self.logs, Answer(200, Logs, "Oldest first."), tag="telemetry",
            summary="Read the console of a sandbox", problems=(400, 404), deprecated=True,
        )  # fmt: skip
        endpoints.add(
            "GET", "/v2/sandboxes/{sandbox_id}/logs", self.logs_v2, Answer(200, LogsV2), tag="telemetry",
            summary="Read the console of a sandbox (v2)", problems=(400, 404),
        )  # fmt: skip

    async def metrics(self, sandbox_id: str, query: Annotated[queries.Period, Query()]) -> Response:
        if self._node.get(sandbox_id).state is not State.RUNNING:
            return present.json_response([])
        sample = await self._node.metrics(sandbox_id)
        if not (query.start or 0) <= sample.timestamp <= (query.end if query.end is not None else sample.timestamp):
            return present.json_response([])
        return present.json_response([present.metric(sample)])

    async def many_metrics(self, query: Annotated[queries.SandboxIds, Query()]) -> Response:
        ids = query.ids()
        slots = asyncio.Semaphore(_CONCURRENT)

        async def sample(sandbox_id: str) -> present.Json | None:
            async with slots:
                try:
                    return present.metric(await self._node.metrics(sandbox_id))
                except AgentEnvError:
                    return None  # gone, paused or silent: the others are still worth an answer

        samples = await asyncio.gather(*(sample(one) for one in ids))
        found = {one: shown for one, shown in zip(ids, samples, strict=True) if shown is not None}
        return present.json_response({"sandboxes": found})

    async def logs(self, sandbox_id: str, query: Annotated[queries.LogQuery, Query()]) -> Response:
        if query.start is None:
            lines = await self._lines(sandbox_id, query.limit)
        else:
            since = _instant(query.start)
            lines = [one for one in await self._lines(sandbox_id, _KEPT_LINES) if one.timestamp >= since][: query.limit]
        return present.json_response(
            {
                "logs": [present.log_line(one) for one in lines],
                "logEntries": [present.log_entry(one) for one in lines],
            }
        )

    async def logs_v2(self, sandbox_id: str, query: Annotated[queries.LogQueryV2, Query()]) -> Response:
        lines = [one for one in await self._lines(sandbox_id, _KEPT_LINES) if _is_wanted(one, query)]
        if query.direction == "backward":
            lines.reverse()
        return present.json_response({"logs": [present.log_entry(one) for one in lines[: query.limit]]})

    async def _lines(self, sandbox_id: str, limit: int) -> Sequence[LogLine]:
        self._node.get(sandbox_id)
        return await self._node.logs(sandbox_id, limit=limit) if limit else []


def _is_wanted(line: LogLine, query: queries.LogQueryV2) -> bool:
    if query.level is not None and _LEVELS.index(line.level) < _LEVELS.index(query.level):
        return False
    if query.search and query.search not in line.message:
        return False
    if query.cursor is None:
        return True
    cursor = _instant(query.cursor)
    return line.timestamp >= cursor if query.direction == "forward" else line.timestamp <= cursor


def _instant(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(min(milliseconds / 1000, 253_402_300_799), UTC)
