"""The two-phase handshake between workers: what both sides send, and how each checks it.

Protocol version and compatibility hash are compared before anything inner is decoded; only then is the peer's
identity (pools, epoch, agent metadata) read.
"""

from twopool.protocol.codec import encode, peer_identity_decoder
from twopool.protocol.errors import ProtocolError
from twopool.protocol.messages import PROTOCOL_VERSION, PeerHello, PeerIdentity, PeerWelcome

_decoder = peer_identity_decoder()


def hello(compatibility_hash: str, identity: PeerIdentity) -> PeerHello:
    return PeerHello(
        protocol_version=PROTOCOL_VERSION, compatibility_hash=compatibility_hash, identity=encode(identity)
    )


def welcome(compatibility_hash: str, identity: PeerIdentity) -> PeerWelcome:
    return PeerWelcome(
        protocol_version=PROTOCOL_VERSION, compatibility_hash=compatibility_hash, identity=encode(identity)
    )


def check(message: PeerHello | PeerWelcome, compatibility_hash: str) -> PeerIdentity:
    """The peer's identity; raises ``ProtocolError`` in words when the two workers cannot exchange KV."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version {message.protocol_version} does not work with version {PROTOCOL_VERSION}"
        )
    if message.compatibility_hash != compatibility_hash:
        raise ProtocolError(
            "the workers' KV does not mean the same (other weights, dtype or attention settings): "
            f"compatibility hash {message.compatibility_hash} does not equal {compatibility_hash}"
        )
    return _decoder.decode(message.identity)
