"""The firewall of the network namespace that the calling thread is in, through libnftables.

A text is applied as one transaction: the kernel takes all of it or none. Calls
block for a millisecond or so; they belong on a thread, never on the event loop.
"""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from agentenv.model.errors import Unavailable, Unsupported

LIBRARY: Final = "libnftables.so.1"

_OUTPUT_JSON: Final = 1 << 4
_CLOSERS: Final = 4
_MOST_CLOSING: Final = 64


class Nft:
    """libnftables, loaded once. Safe to use from several threads."""

    def __init__(self) -> None:
        """Raises `Unsupported` where the library is missing."""
        self._library = _load()
        # The library keeps state of its own between calls (the parser's, the cache of link names).
        self._one_at_a_time = threading.Lock()
        # Closing a context's socket waits for the kernel to free what the last transaction
        # removed: 30 ms, to be spent by nobody who waits for rules.
        self._closers = ThreadPoolExecutor(_CLOSERS, thread_name_prefix="nft-close")
        # All started now: a thread started by one that is inside a slot would keep that slot's namespace.
        started = threading.Barrier(_CLOSERS + 1)
        for _ in range(_CLOSERS):
            self._closers.submit(started.wait)
        started.wait()
        self._closing = threading.BoundedSemaphore(_MOST_CLOSING)

    def run(self, text: str) -> None:
        """Apply *text*. Raises `Unavailable` with the library's words; nothing has changed then."""
        self._call(text, 0)

    def read(self, text: str) -> str:
        """The JSON answer to the listing command *text*. Raises as `run` does."""
        return self._call(text, _OUTPUT_JSON)

    def close(self) -> None:
        """Wait for the contexts that are being closed. The object is of no use after that."""
        self._closers.shutdown(wait=True)

    def _call(self, text: str, output: int) -> str:
        with self._one_at_a_time:
            context = self._library.nft_ctx_new(0)
            if not context:
                raise Unavailable("the firewall library could not open its netlink socket")
            try:
                for buffered in (self._library.nft_ctx_buffer_output, self._library.nft_ctx_buffer_error):
                    if buffered(context) != 0:
                        raise Unavailable("the firewall library is out of memory")
                self._library.nft_ctx_output_set_flags(context, output)
                status = self._library.nft_run_cmd_from_buffer(context, text.encode())
                answer: bytes = self._library.nft_ctx_get_output_buffer(context) or b""
                error: bytes = self._library.nft_ctx_get_error_buffer(context) or b""
            finally:
                self._free(context)
        if status != 0:
            raise Unavailable(f"the firewall refused its rules: {_first_line(error)}")
        return answer.decode()

    def _free(self, context: int) -> None:
        if not self._closing.acquire(blocking=False):
            self._library.nft_ctx_free(context)  # too many already: whoever makes them waits
            return
        self._closers.submit(self._free_later, context)

    def _free_later(self, context: int) -> None:
        # Needs no lock: what it frees is the context's own, as long as no rule names a link by index.
        try:
            self._library.nft_ctx_free(context)
        finally:
            self._closing.release()


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Unsupported(
            f"the firewall library cannot be loaded: {error}", hint="install libnftables (Debian: libnftables1)"
        ) from error
    context, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("nft_ctx_new", context, [ctypes.c_uint32]),
        ("nft_ctx_free", None, [context]),
        ("nft_ctx_buffer_output", ctypes.c_int, [context]),
        ("nft_ctx_buffer_error", ctypes.c_int, [context]),
        ("nft_ctx_get_output_buffer", text, [context]),
        ("nft_ctx_get_error_buffer", text, [context]),
        ("nft_ctx_output_set_flags", None, [context, ctypes.c_uint]),
        ("nft_run_cmd_from_buffer", ctypes.c_int, [context, text]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _first_line(error: bytes) -> str:
    return next((line for line in error.decode(errors="replace").splitlines() if line.strip()), "no reason given")
