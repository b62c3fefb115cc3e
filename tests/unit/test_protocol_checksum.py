"""CRC-64/XZ: crcmod is the reference; WIRE.md's words for it are tried out here, bit by bit."""

from __future__ import annotations

import sys
import types

import pytest

from immortal.protocol import checksum
from immortal.protocol.checksum import crc64, crc64_reference


def in_the_words_of_wire_md(data: bytes) -> int:
    register = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0xC96C5795D7870F42 if register & 1 else 0)
    return register ^ 0xFFFFFFFFFFFFFFFF


@pytest.mark.parametrize("function", [crc64, crc64_reference, in_the_words_of_wire_md])
def test_check_values(function: object) -> None:
    assert callable(function)
    assert function(b"") == 0
    assert function(b"123456789") == 0x995DC9BBDF1939FA
    assert function(b"\0") == 0x1FADA17364673F59


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8, 9, 63, 64, 65, 255, 1 << 16])
def test_all_kinds_of_buffers(kind: type, size_bytes: int) -> None:
    data = bytes(index * 37 & 0xFF for index in range(size_bytes))
    assert crc64(kind(data)) == crc64_reference(kind(data)) == crc64_reference(data)
    view = memoryview(b"x" + data + b"x")[1 : 1 + size_bytes]
    assert crc64(view) == crc64_reference(data)


def test_without_fastcrc_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastcrc.crc64", None)
    assert checksum._fastest() is crc64_reference


def test_with_fastcrc_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fastcrc.crc64")
    module.xz = lambda data, value=0: 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastcrc.crc64", module)
    assert checksum._fastest()(b"") == 7
