"""Every error of this project, by whose fault it is.

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


class ImmortalError(Exception):
    """The root: anything that this project raises on purpose."""


class ProtocolError(ImmortalError):
    """The protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side was asked to send something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


class LimitExceededError(RemoteProtocolError):
    """Something larger than a limit came in."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} of {size_bytes} bytes, at most {limit_bytes} are accepted")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class DamagedRecordError(RemoteProtocolError):
    """A record's bytes are not those that were written."""
