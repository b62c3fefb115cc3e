"""Root and shared errors of this project, by which side is at fault.

    ImmortalError
      ProtocolError
        LocalProtocolError      we were asked to send what the protocol does not allow
        RemoteProtocolError     what came in is not the protocol
          LimitExceededError    ... it is larger than a limit of ours; says both numbers
          DamagedRecordError    ... its check bytes do not match: damaged on the way, or on disk

Other parts add their own branches below ImmortalError. The message of each is written for the person who reads it: what
came, what was expected, what to do.
"""

from __future__ import annotations

from typing import Any


class ImmortalError(Exception):
    """Root of all errors that this project raises on purpose.

    Each error can be copied and pickled, whatever its constructor takes: a handler may keep one in its state.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self).__init__ is Exception.__init__:
            return super().__reduce__()  # type: ignore[return-value]  # what shows states reads this form
        return restore_error, (type(self), self.args), self.__dict__


def restore_error(cls: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """Make an error again without its constructor. Pickled states name this function."""
    return cls.__new__(cls, *arguments)


class ProtocolError(ImmortalError):
    """Raised if the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """Raised when this side is asked to send something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """Raised if the other side sent something that the protocol does not allow."""


class LimitExceededError(RemoteProtocolError):
    """Raised for incoming data that is larger than a limit."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} of {size_bytes} bytes, at most {limit_bytes} are accepted")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class DamagedRecordError(RemoteProtocolError):
    """Raised if a record's bytes are not those that were written."""
