"""Root and shared errors of this project, by the side at fault.

    ImmortalError
      ProtocolError
        LocalProtocolError      this side was asked to send something that the protocol does not allow
        RemoteProtocolError     received data violates the protocol
          LimitExceededError    ... it is larger than a limit of this side; has both numbers
          DamagedRecordError    ... its check bytes do not match: damaged in transit, or on disk

Other parts add their own branches below ImmortalError. Each message is for a person: what arrived, what was expected,
what to do.
"""

from __future__ import annotations

from typing import Any


class ImmortalError(Exception):
    """Root of all errors that this project raises on purpose.

    Each error can be copied and pickled, whatever its constructor takes: a handler can keep one in its state.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self).__init__ is Exception.__init__:
            return super().__reduce__()  # type: ignore[return-value]  # tools that show states read this form
        return restore_error, (type(self), self.args), self.__dict__


def restore_error(cls: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """Return an error of class ``cls``, created without its constructor. Pickled states name this function."""
    return cls.__new__(cls, *arguments)


class ProtocolError(ImmortalError):
    """Raised if a side breaks the protocol."""


class LocalProtocolError(ProtocolError):
    """Raised when this side is asked to send something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """Raised if the other side sent something that the protocol does not allow."""


class LimitExceededError(RemoteProtocolError):
    """Raised if incoming data is larger than a limit."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} of {size_bytes} bytes, at most {limit_bytes} are accepted")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class DamagedRecordError(RemoteProtocolError):
    """Raised if the bytes of a record, or a frame, are not those that were written."""
