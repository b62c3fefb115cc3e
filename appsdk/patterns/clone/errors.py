"""What can go wrong with a shared table.

CloneError
  TableFull        there is no room for more rows, bytes, or names; nothing was changed
  NotEntitled      the caller may see nothing of what it asked for
  Ended            its publisher has ended this client's stream, and it does not come back by itself
"""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class CloneError(ImmortalError):
    """The root of a clone's errors."""


class TableFull(CloneError):  # noqa: N818 (what happened, not what is wrong)
    """There is no room for more rows, bytes, or names. Nothing was changed."""


class NotEntitled(CloneError):  # noqa: N818
    """The caller may see nothing of what it asked for."""


class Ended(CloneError):  # noqa: N818
    """Its publisher has ended the stream, for being slow or asking for what is not possible. Connect again."""
