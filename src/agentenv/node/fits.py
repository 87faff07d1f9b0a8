"""Whether a device state loads on this host, looked at before anything is taken or started."""

from agentenv.model.errors import Unsupported
from agentenv.model.machine import Fingerprint
from agentenv.node.host import Host


def check_fits(host: Host, made_on: Fingerprint | None, what: str, *, hint: str) -> None:
    """Raise `Unsupported` if *what* was made on another VMM or CPU than this host's.

    None is a record of an older release, which did not say: it is let through, and the
    VMM has the last word.
    """
    if made_on is None or made_on.loads_on(host.fingerprint):
        return
    raise Unsupported(f"{what} was made on another host ({made_on}); this one is {host.fingerprint}", hint=hint)
