"""What the reading thread asks of the library beneath it: the part in which NIXL and the in-process copy differ.

Every method is called by one thread at a time. Failures are ``TransferError``.
"""

from typing import Protocol

import torch

from twopool.kv_transfer.layout import Index, StridedList
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool


class PreparedList(Protocol):
    """A ``StridedList`` over local or remote memory, ready to be indexed."""

    def release(self) -> None: ...


class Post(Protocol):
    """A READ that was posted."""

    def poll(self) -> bool:
        """Whether it is complete. Raises ``TransferError`` when it failed: it is over then, too."""
        ...

    def release(self) -> None:
        """Free it; call only when it is over."""
        ...


class ReadAgent(Protocol):
    """One rank's reader and source."""

    name: str
    metadata: bytes
    """What a peer needs in order to read from this rank."""

    def register(self, memory: torch.Tensor) -> None:
        """Make ``memory`` (flat uint8, of this rank's kind and device) a destination of READs, for good."""
        ...

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        """Load a peer's rank; the name to use for it from now on."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget a peer that has no open post and no prepared list."""
        ...

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        """``runs`` over registered memory that begins at ``address``."""
        ...

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        """``runs`` over a peer's pool."""
        ...

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        """Start reading run ``remote_index[i]`` into run ``local_index[i]``; may do all of it before returning."""
        ...

    def pump(self) -> None:
        """Answer peers."""
        ...
