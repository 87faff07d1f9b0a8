"""The way to a sandbox: whether the caller may take it, and waking the sandbox where that is what it takes."""

import asyncio
from typing import Final

from agentenv.model.errors import AgentEnvError, Conflict, DeadlineExceeded, NotFound
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.node.contract import Node, Route
from agentenv.proxy import errors
from agentenv.proxy.access import Credentials, may_pass, may_wake
from agentenv.proxy.errors import Answer
from agentenv.proxy.route import ToSandbox

ATTEMPTS: Final = 3  # a sandbox may be paused again between waking and connecting
_WAKEABLE: Final = (State.PAUSING, State.PAUSED, State.RESUMING)


class Refused(Exception):
    """The way ends here, with this answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Gate:
    """
    Args:
        node: who knows the sandboxes.
        wake_timeout_s: how long one may take to run again, in seconds.
    """

    def __init__(self, node: Node, wake_timeout_s: float) -> None:
        self._node = node
        self._wake_timeout_s = wake_timeout_s

    def sandbox(self, target: ToSandbox) -> Sandbox:
        """The sandbox in whatever state, or `Refused`."""
        try:
            return self._node.get(target.sandbox_id)
        except NotFound:
            raise Refused(errors.no_such_sandbox(target)) from None

    def explain(self, target: ToSandbox, error: AgentEnvError) -> Refused:
        """Why there is no answer: a sandbox that is gone by now explains more than the *error* it caused."""
        state = self.sandbox(target).state
        if not state.has_guest:
            return Refused(errors.not_running(target, _in_words(state)))
        return Refused(errors.failed(target, error))

    async def way(self, target: ToSandbox, shown: Credentials, method: str, query: bytes) -> tuple[Route, bool]:
        """The route to *target*, and whether it had to be woken for this request (with *method* and *query*).

        The caller is checked first, on a running sandbox as on one at rest. Raises
        `Refused`. Cancelled, the waiting ends and the waking goes on.
        """
        for attempt in range(ATTEMPTS):
            way = self._route(target)
            if way is None or way.sandbox.state is State.PAUSING:
                await self._wake(target, shown, method, query)
                continue
            if not may_pass(target.port, way.traffic_token, shown):
                raise Refused(errors.token_required(target))
            return way, attempt > 0
        raise Refused(errors.not_running(target, "starting and stopping"))

    def _route(self, target: ToSandbox) -> Route | None:
        try:
            return self._node.route(target.sandbox_id)
        except NotFound:
            raise Refused(errors.no_such_sandbox(target)) from None
        except Conflict:
            return None

    async def _wake(self, target: ToSandbox, shown: Credentials, method: str, query: bytes) -> None:
        sandbox = self.sandbox(target)
        tokens = self._node.tokens(sandbox)
        if not may_pass(target.port, tokens.traffic, shown):
            raise Refused(errors.token_required(target))
        if not sandbox.auto_resume or sandbox.state not in _WAKEABLE:
            raise Refused(errors.not_running(target, _in_words(sandbox.state)))
        if not may_wake(target.port, tokens, shown, method, target.path, query):
            raise Refused(errors.agent_token_required())
        try:
            async with asyncio.timeout(self._wake_timeout_s):
                await self._node.wake(target.sandbox_id)
        except TimeoutError:
            raise Refused(errors.not_woken(target, DeadlineExceeded("the sandbox did not wake in time"))) from None
        except AgentEnvError as error:
            raise Refused(errors.not_woken(target, error)) from error


def _in_words(state: State) -> str:
    match state:
        case State.PAUSED | State.PAUSING:
            return "paused"
        case State.ERROR:
            return "in error"
        case _:
            return state.value
