"""How a fuzzer's input becomes numbers, pieces and choices."""

from __future__ import annotations


class Fields:
    """Takes bytes apart into small numbers and pieces; where they end, zeros follow."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def left(self) -> bool:
        return self._offset < len(self._data)

    def piece(self, size_bytes: int) -> bytes:
        taken = self._data[self._offset : self._offset + size_bytes]
        self._offset += size_bytes
        return taken

    def number(self, size_bytes: int = 1) -> int:
        return int.from_bytes(self.piece(size_bytes), "little")

    def one_of(self, *choices: object) -> object:
        return choices[self.number() % len(choices)]
