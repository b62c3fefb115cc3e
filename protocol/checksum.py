"""CRC-64/XZ, the checksum of records, frames and files.

crcmod is the reference (poly 0x42F0E1EBA9EA3693, reflected, init and xorout all ones; the check value of
b"123456789" is 0x995DC9BBDF1939FA). fastcrc gives the same bits over a hundred times faster and is used if it can
be imported.
"""

from __future__ import annotations

from collections.abc import Callable

import crcmod

Bytes = bytes | bytearray | memoryview

_reference = crcmod.mkCrcFun(0x142F0E1EBA9EA3693, initCrc=0, rev=True, xorOut=0xFFFFFFFFFFFFFFFF)


def crc64_reference(data: Bytes, value: int = 0) -> int:
    """Return the CRC-64/XZ of ``data`` by crcmod, continuing from ``value``: the reference for :data:`crc64`."""
    return int(_reference(bytes(data), value))


def _fastest() -> Callable[..., int]:
    try:
        from fastcrc.crc64 import xz
    except ImportError:  # no wheel for this platform: slower, the same bits
        return crc64_reference
    return xz


crc64 = _fastest()
"""Function for the CRC-64/XZ: ``crc64(data, value=0, /) -> int``. It chains: ``crc64(b, crc64(a)) == crc64(a + b)``."""
