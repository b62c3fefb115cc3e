"""MessagePack of hostile structure, from a seed: depth, width, length fields, types, extensions, what ends too soon."""

from __future__ import annotations

import random
from collections.abc import Callable

from immortal.appsdk.types.handles import EXTENSION_CODE, MARK

HUGE = (0xFF, 0xFFFF, 0xFFFF_FFFF, 0x7FFF_FFFF, 1 << 24, 1 << 16, 65)
DEPTHS = (1, 2, 30, 62, 63, 64, 65, 66, 200, 500, 900, 980, 1000, 1100, 1600, 20_000)


class Structures:
    """``rng``: all that is drawn comes from there."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kinds: tuple[Callable[[], bytes], ...] = (
            self.scalar,
            self.scalar,
            self.nested,
            self.nested,
            self.wide,
            self.length,
            self.extension,
            self.text,
            self.damaged,
            self.mixed,
            self.noise,
        )

    def value(self) -> bytes:
        return self._rng.choice(self._kinds)()

    def array(self, *front: bytes) -> bytes:
        """Of arguments: mostly as many as are said."""
        rng = self._rng
        items = [*front, *(self.value() for _ in range(rng.randrange(4)))]
        count = len(items) if rng.random() < 0.9 else rng.randrange(16)
        return bytes((0x90 | count,)) + b"".join(items)

    def scalar(self) -> bytes:
        rng = self._rng
        first = rng.choice((0xC0, 0xC2, 0xC3, 0x00, 0x7F, 0xE0, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3, 0xCB))
        size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xCB: 8}.get(first, 0)
        return bytes((first,)) + rng.randbytes(size)

    def nested(self) -> bytes:
        rng = self._rng
        depth = rng.choice(DEPTHS)
        level = rng.choice(
            (b"\x91", b"\x81\xa1k", b"\x81", b"\x92\x01", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\xde\x00\x01\x01")
        )
        return level * depth + (b"" if rng.random() < 0.2 else self.scalar())

    def wide(self) -> bytes:
        rng = self._rng
        count = rng.choice((15, 16, 300, 3000))
        item = rng.choice((b"\x01", b"\x91\x01", b"\xa1a", b"\xc4\x01\x00"))
        if rng.random() < 0.3:
            pairs = b"".join(b"\xcd" + (index % 50).to_bytes(2, "big") + item for index in range(count))
            return b"\xde" + count.to_bytes(2, "big") + pairs
        return b"\xdc" + count.to_bytes(2, "big") + item * count

    def length(self) -> bytes:
        """More is promised than comes, or less."""
        rng = self._rng
        code = rng.choice((0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF))
        width = {0xC4: 1, 0xC7: 1, 0xD9: 1, 0xC6: 4, 0xC9: 4, 0xDB: 4, 0xDD: 4, 0xDF: 4}.get(code, 2)
        size = min(rng.choice(HUGE), (1 << 8 * width) - 1)
        return bytes((code,)) + size.to_bytes(width, "big") + rng.randbytes(rng.randrange(20))

    def extension(self) -> bytes:
        """Also those of the SDK's own, with what is none of theirs, and one in another again and again."""
        rng = self._rng
        code = rng.choice((EXTENSION_CODE & 0xFF, 0, 1, 42, 0x7F, 0x80, 0xFF))
        owner = rng.choice((b"evil", b"service", b"\0", b"x\0", b"\xff", b"a" * 300, b"~", b"", b"nobody"))
        data = rng.choice((b"", MARK, MARK + rng.randbytes(16) + owner, rng.randbytes(12), b"\xff" * 12))
        for _ in range(rng.choice((0, 0, 1, 3, 10))):
            data = b"\xc8" + len(data).to_bytes(2, "big") + bytes((code,)) + data
        return b"\xc8" + len(data).to_bytes(2, "big") + bytes((code,)) + data

    def text(self) -> bytes:
        data = self._rng.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b"a" * 31, b"\xc3"))
        return b"\xd9" + bytes((len(data),)) + data

    def damaged(self) -> bytes:
        data = bytearray(self._rng.choice((self.wide, self.extension, self.nested))())
        for _ in range(self._rng.randrange(1, 4)):
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)
        return bytes(data)

    def mixed(self) -> bytes:
        rng = self._rng
        data = self.scalar()
        for _ in range(rng.choice((3, 40, 64, 70, 400))):
            front = rng.choice((b"\x91", b"\x93\x01\xa1a", b"\x82\x01\x02\xa1b", b"\x81\x01", b"\xdc\x00\x02\xc0"))
            data = front + data
        return data

    def noise(self) -> bytes:
        return self._rng.randbytes(self._rng.choice((0, 1, 3, 20, 200)))
