"""What the leader of a worker tells the transports of its other ranks, and what they answer.

Calls, links and fetches are numbered by the leader, each kind from 0. Ids travel as little-endian int32 bytes.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from twopool.kv_transfer.interface import FetchReport
from twopool.protocol import errors
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvDtype
from twopool.protocol.messages import MAX_PROMPT_TOKENS, PeerIdentity

_Number = Annotated[int, Meta(ge=0)]
_Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Seconds = Annotated[float, Meta(gt=0)]
_IdBytes = Annotated[bytes, Meta(max_length=4 * MAX_PROMPT_TOKENS)]
_SumBytes = Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
_Text = Annotated[str, Meta(max_length=8192)]

_ERRORS: Final[dict[str, type[TransferError]]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransferError)
}


class Failure(Struct, frozen=True):
    """A ``TransferError`` by the name of its type."""

    type_name: Annotated[str, Meta(max_length=64)]
    message: _Text

    @classmethod
    def of(cls, error: TransferError) -> "Failure":
        return cls(type(error).__name__, error.message[:8192])

    def error(self, rank: int) -> TransferError:
        """The error again, as ``rank``'s."""
        return _ERRORS.get(self.type_name, TransferError)(f"rank {rank}: {self.message}")


# --- leader → rank


class OpenLink(Struct, frozen=True, kw_only=True, tag="open_link"):
    """``KvTransport.connect``; ``LinkOpened`` answers. ``link`` is what the link is called from now on."""

    link: _Number
    peer: PeerIdentity
    timeout_s: _Seconds


class CloseLink(Struct, frozen=True, kw_only=True, tag="close_link"):
    """``KvTransport.disconnect``; of a link that did not open, nothing."""

    link: _Number


class StartFetch(Struct, frozen=True, kw_only=True, tag="start_fetch"):
    """``KvTransport.fetch``; ``FetchOver`` and ``FetchSettled`` follow."""

    fetch: _Number
    link: _Number
    remote_block_ids: _IdBytes
    local_block_ids: _IdBytes
    start_token: _Index
    end_token: _Index
    layer_start: _Index
    layer_end: _Index
    timeout_s: _Seconds


class CancelFetch(Struct, frozen=True, kw_only=True, tag="cancel_fetch"):
    fetch: _Number


class ExpectReaders(Struct, frozen=True, kw_only=True, tag="expect_readers"):
    expected: bool


class SumUnits(Struct, frozen=True, kw_only=True, tag="sum_units"):
    """``KvTransport.checksums``; ``UnitSums`` answers."""

    call: _Number
    block_ids: _IdBytes
    start_token: _Index
    unit_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    layer_start: _Index
    layer_end: _Index
    units: _IdBytes
    dtype: KvDtype | None = None


KvCommand = OpenLink | CloseLink | StartFetch | CancelFetch | ExpectReaders | SumUnits


# --- rank → leader


class LinkOpened(Struct, frozen=True, kw_only=True, tag="link_opened"):
    link: _Number
    failure: Failure | None = None


class LinkLost(Struct, frozen=True, kw_only=True, tag="link_lost"):
    """The link is open no more, although nobody closed it."""

    link: _Number


class FetchOver(Struct, frozen=True, kw_only=True, tag="fetch_over"):
    """The end of ``FetchHandle.wait``: one of both is there."""

    fetch: _Number
    report: FetchReport | None = None
    failure: Failure | None = None


class FetchSettled(Struct, frozen=True, kw_only=True, tag="fetch_settled"):
    """No READ of the fetch writes this rank's pool any more; the last word on it."""

    fetch: _Number


class UnitSums(Struct, frozen=True, kw_only=True, tag="unit_sums"):
    """``[units, heads of the rank]`` little-endian uint64."""

    call: _Number
    sums: _SumBytes


KvAnswer = LinkOpened | LinkLost | FetchOver | FetchSettled | UnitSums
