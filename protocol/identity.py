"""Identity of things with a name or key: a name with the same contents is the same thing; a name with other contents
is refused, and the error describes both. ``docs/reference/names.md`` lists each kind.

A digest stands for the contents, so its size is bounded. If no digest is known, as in data of earlier versions, nothing
is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from immortal.protocol.errors import ImmortalError
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from immortal.protocol.varint import Readable, decode_zigzag_int, encode_zigzag

DIGEST_SIZE_BYTES = 16
CALL_DIGEST_SIZE_BYTES = 8  # kept with each reply; guards against mistakes, not attacks
EMPTY_DIGEST = bytes(DIGEST_SIZE_BYTES)
SHOWN_DIGITS = 12
KEY_ADVICE = "nothing was done; give each call a key of its own"
CLIENT_ADVICE = "nothing was done; a client_id makes the same requests each time it is used, others need another one"


class IdentityConflict(ImmortalError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if a name or key already belongs to something else. Nothing was done.

    ``what``: the name. ``known``: what is stored under it. ``given``: what arrived. ``advice``: what to do. Logs of
    earlier versions have only one text, ``what``.
    """

    what = known = given = advice = ""

    def __init__(self, what: str, known: str = "", given: str = "", advice: str = "") -> None:
        if not known:
            super().__init__(what)
            return
        super().__init__(f"{what} is {known}, not {given}: {advice}")
        self.what = what
        self.known = known
        self.given = given
        self.advice = advice


def chained_digest(before: bytes, parts: Iterable[Readable]) -> bytes:
    """Return the digest of the parts, chained in order. ``before``: digest of earlier parts, or EMPTY_DIGEST.

    The digest does not depend on how calls divide the parts. Only one part at a time is in memory.
    """
    for part in parts:
        before = blake2b(b"".join((before, part)), digest_size=DIGEST_SIZE_BYTES).digest()
    return before


def digest_prefix(digest: bytes) -> str:
    """Return a prefix of a digest in hex, long enough for people to tell it from others."""
    return digest.hex()[:SHOWN_DIGITS]


# --- calls of clients -------------------------------------------------------------------------------------------------


def call_identity(method_id: int, arguments: bytes) -> bytes:
    """Return the identity of a call: a digest, and for messages the method ID and the size of the arguments.

    A cancellation has the same identity whatever its reason.
    """
    if method_id == CANCEL_CALL_METHOD_ID:
        arguments = b""
    digest = blake2b(arguments, digest_size=CALL_DIGEST_SIZE_BYTES).digest()
    return digest + encode_zigzag(method_id) + encode_zigzag(len(arguments))


def method_of_identity(identity: bytes) -> int:
    """Return the method ID of a call's identity. Raises RemoteProtocolError."""
    return decode_zigzag_int(identity, CALL_DIGEST_SIZE_BYTES)[0]


def describe_call_identity(identity: bytes, method: str) -> str:
    """Describe a call by its identity. ``method``: the method's name. Raises RemoteProtocolError."""
    _, offset = decode_zigzag_int(identity, CALL_DIGEST_SIZE_BYTES)
    size_bytes, _ = decode_zigzag_int(identity, offset)
    return f"{method} with {size_bytes} bytes of arguments (digest {digest_prefix(identity[:CALL_DIGEST_SIZE_BYTES])})"
