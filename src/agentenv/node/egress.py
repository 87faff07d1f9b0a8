"""Change what a running sandbox may reach: on the host first, and in its record once that is so."""

from agentenv.model.errors import AgentEnvError
from agentenv.model.ids import SandboxId
from agentenv.model.policy import EgressPolicy
from agentenv.model.sandbox import Sandbox
from agentenv.node.host import Host
from agentenv.node.still import live_of


async def set_egress(host: Host, sandbox_id: SandboxId, policy: EgressPolicy) -> Sandbox:
    """Return once *policy* is enforced and recorded. `Conflict` unless the sandbox runs.

    When it cannot be recorded, the policy before it is in force again.
    """
    live = live_of(host, sandbox_id)
    before = host.registry.get(sandbox_id).egress
    await host.slots.apply(live.slot, policy)
    try:
        return await host.registry.change(sandbox_id, egress=policy)
    except AgentEnvError:
        await host.slots.apply(live.slot, before)
        raise
