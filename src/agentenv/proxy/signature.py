"""Signed file links: which sandbox one belongs to, when nothing else in the request says so.

``signature`` is ``v1_`` and the unpadded base64 of SHA-256 over
``path:operation:username:token[:expiration]``. The proxy only looks for the sandbox
whose token fits; whether the link is still good is for the guest agent to say.
"""

import hashlib
import hmac
from base64 import b64encode
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

_OPERATIONS: Final = {"GET": "read", "HEAD": "read", "POST": "write"}
_MAX_FIELDS: Final = 32


@dataclass(frozen=True, slots=True)
class SignedFile:
    """One signed access to one path, as the query says it."""

    path: str
    operation: str
    username: str
    expiration: str | None
    signature: str

    def matches(self, token: str) -> bool:
        """Whether the signature was made with *token*. Takes the same time for every wrong one."""
        return hmac.compare_digest(self._signed_with(token).encode(), self.signature.encode())

    def _signed_with(self, token: str) -> str:
        parts = [self.path, self.operation, self.username, token]
        if self.expiration is not None:
            parts.append(self.expiration)
        digest = hashlib.sha256(":".join(parts).encode()).digest()
        return "v1_" + b64encode(digest).decode().rstrip("=")


def parse_signed(method: str, query: bytes) -> SignedFile | None:
    """Return the signed access in *query*, or None if there is none or it cannot be one."""
    operation = _OPERATIONS.get(method)
    if operation is None or b"signature=" not in query:
        return None
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        return None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(name, value)  # the first counts, for the agent too
    if not fields.get("signature"):
        return None
    return SignedFile(
        path=fields.get("path", ""),
        operation=operation,
        username=fields.get("username", ""),
        expiration=fields.get("signature_expiration"),
        signature=fields["signature"],
    )
