"""Sandboxes that a client asked for and does not wait for any more: nobody has learnt their ids.

They would live to the end of their time with nobody to use or delete them. So they are
deleted, unless the client can still ask for them again, which an Idempotency-Key is for. An
answer that is lost on its way, after it was sent, cannot be told from one that arrived.
"""

import asyncio
from collections.abc import Sequence

import structlog
from starlette.requests import Request

from agentenv.model.errors import AgentEnvError, NotFound
from agentenv.model.sandbox import Sandbox
from agentenv.node.contract import Node

log = structlog.get_logger(__name__)


async def delete_unclaimed(node: Node, request: Request, made: Sequence[Sandbox]) -> None:
    """Delete *made* if the client of *request* has hung up. Never raises an error of a kind."""
    if made and await request.is_disconnected():
        await asyncio.gather(*(_delete(node, sandbox) for sandbox in made))


async def _delete(node: Node, sandbox: Sandbox) -> None:
    log.info("the client hung up before its sandbox was ready: it is deleted", sandbox=sandbox.id)
    try:
        await node.delete(sandbox.id)
    except NotFound:
        return
    except AgentEnvError:
        log.exception("a sandbox that nobody claims could not be deleted yet", sandbox=sandbox.id)
