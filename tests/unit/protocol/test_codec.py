"""Every message survives the wire; nothing else does."""

from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twopool.protocol import codec
from twopool.protocol import messages as m
from twopool.protocol.errors import ProtocolError
from twopool_testing.message_strategies import messages

UNIONS: dict[str, tuple[Any, codec.Decoder[Any]]] = {
    "worker to router": (m.WorkerToRouter, codec.worker_to_router_decoder()),
    "router to worker": (m.RouterToWorker, codec.router_to_worker_decoder()),
    "reader to source": (m.ReaderToSource, codec.reader_to_source_decoder()),
    "source to reader": (m.SourceToReader, codec.source_to_reader_decoder()),
}
EVERY_MESSAGE = [(name, struct) for name, (union, _) in UNIONS.items() for struct in get_args(union)]


@pytest.mark.parametrize(("union", "struct"), EVERY_MESSAGE, ids=[s.__name__ for _, s in EVERY_MESSAGE])
def test_every_message_survives_the_wire(union: str, struct: type[msgspec.Struct]) -> None:
    @settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
    @given(messages(struct))
    def check(message: msgspec.Struct) -> None:
        data = codec.encode(message)
        assert UNIONS[union][1].decode(data) == message
        # The reference implementation reads the same bytes.
        assert msgpack.unpackb(data) == _lists(msgspec.to_builtins(message, builtin_types=(bytes,)))

    check()


def _lists(value: Any) -> Any:
    """Tuples as the lists they are on the wire."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("union", UNIONS)
def test_random_bytes_are_rejected_and_nothing_else_raised(union: str) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200))
    def check(data: bytes) -> None:
        try:
            UNIONS[union][1].decode(data)
        except ProtocolError:
            return
        raise AssertionError(f"{data!r} was taken for a message")

    check()


_SAMPLES = {
    "worker to router": m.Tokens((m.TokenDelta("r", 0, 0, 0, (1, 2, 3)),)),  # type: ignore[arg-type]
    "router to worker": m.ResendFrom(request_id="r", attempt=1, choice=0, index=3),  # type: ignore[arg-type]
    "reader to source": m.ReleasePrefill(request_id="r", attempt=1),  # type: ignore[arg-type]
    "source to reader": m.Confirmed(request_id="r", attempt=1, valid=True),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("union", UNIONS)
def test_damaged_messages_decode_to_a_message_or_a_protocol_error(union: str) -> None:
    good = codec.encode(_SAMPLES[union])

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, len(good) - 1), st.integers(0, 255), st.booleans())
    def check(position: int, value: int, truncate: bool) -> None:
        data = good[:position] if truncate else good[:position] + bytes([value]) + good[position + 1 :]
        try:
            decoded = UNIONS[union][1].decode(data)
        except ProtocolError:
            return
        assert isinstance(decoded, msgspec.Struct)

    check()


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,  # nested beyond any stack
        b"\xdd\xff\xff\xff\xff",  # an array that claims four billion entries
        b"\xc6\xff\xff\xff\xff",  # bytes that claim four billion
        msgpack.packb({"type": "no_such_message"}),
        msgpack.packb({"type": "draining", "epoch": "not a number"}),
        msgpack.packb({"type": "draining"}),
        msgpack.packb({"type": "draining", "epoch": 1}) + b"trailing",
        b"",
    ],
)
def test_hostile_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        UNIONS["worker to router"][1].decode(data)


def test_oversized_messages_are_rejected_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(ProtocolError, match="exceeds 10"):
        codec.encode(_SAMPLES["reader to source"])
    with pytest.raises(ProtocolError, match="exceeds 10"):
        UNIONS["reader to source"][1].decode(b"\x00" * 11)


def test_bounds_of_fields_are_checked() -> None:
    too_many = msgpack.packb(
        {"type": "cancel", "request_id": "r" * 300, "attempt": "x"},
    )
    with pytest.raises(ProtocolError):
        UNIONS["router to worker"][1].decode(too_many)
    with pytest.raises(ValueError, match="buffer size"):
        m.unpack_ids(b"12345")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert m.unpack_ids(m.pack_ids(ids)).tolist() == ids
