"""What a command in a guest writes and how it ends, put together from the frames of its stream."""

import base64
from typing import Final

from agentenv.guest.connect import Frame
from agentenv.guest.contract import Completed
from agentenv.model.errors import Bug, Invalid, Unavailable

MAX_OUTPUT_BYTES: Final = 10 << 20


class CommandOutput:
    """The output of *command* so far; `Bug` when there is too much of it, or when it could not be started."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._written = {"stdout": bytearray(), "stderr": bytearray()}
        self._exit_code: int | None = None

    def add(self, frame: Frame) -> None:
        """Take in one frame; `Unavailable` for one that means nothing."""
        match frame.message:
            case {"error": {"code": "invalid_argument", "message": message}} if frame.end:
                raise Invalid(f"{self._command}: {message}")
            case {"error": error} if frame.end:
                raise Bug(f"{self._command}: {error.get('message') if isinstance(error, dict) else error}")
            case {"event": {"data": {**streams}}}:
                for stream, text in streams.items():
                    self._write(stream, text)
            case {"event": {"end": {"exitCode": int(exit_code)}}}:
                self._exit_code = exit_code
            case {"event": {"end": {}}}:
                self._exit_code = 0  # JSON of the protocol may leave out a zero

    def completed(self) -> Completed:
        if self._exit_code is None:
            raise Unavailable(f"the guest agent did not say how {self._command} ended")
        return Completed(self._exit_code, bytes(self._written["stdout"]), bytes(self._written["stderr"]))

    def _write(self, stream: object, text: object) -> None:
        if stream not in self._written or not isinstance(text, str):
            raise Unavailable(f"the guest agent sent an output of {self._command} that cannot be read")
        try:
            written = self._written[str(stream)]
            written += base64.b64decode(text, validate=True)
        except ValueError as error:
            raise Unavailable(f"the guest agent sent an output of {self._command} that is not base64") from error
        if len(written) > MAX_OUTPUT_BYTES:
            raise Bug(f"{self._command} wrote more than {MAX_OUTPUT_BYTES} bytes")
