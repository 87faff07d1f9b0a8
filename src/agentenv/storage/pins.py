"""Pins: what nobody has recorded yet and no collector may take. Counted, and gone with this process."""

from collections import Counter
from collections.abc import Collection

from agentenv.model.errors import Bug
from agentenv.model.ids import BlobId, LayerId


class Pins:
    """Whether there is what is pinned is for the caller to see to."""

    def __init__(self) -> None:
        self._layers: Counter[LayerId] = Counter()
        self._blobs: Counter[BlobId] = Counter()

    def add(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        self._layers.update(layers)
        self._blobs.update(blobs)

    def drop(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        """Raises `Bug`, and drops nothing, for more than was pinned."""
        fewer_layers, fewer_blobs = Counter(layers), Counter(blobs)
        if not (fewer_layers <= self._layers and fewer_blobs <= self._blobs):
            raise Bug("unpinned what is not pinned")
        self._layers -= fewer_layers
        self._blobs -= fewer_blobs

    @property
    def layers(self) -> Collection[LayerId]:
        return self._layers.keys()

    @property
    def blobs(self) -> Collection[BlobId]:
        return self._blobs.keys()
