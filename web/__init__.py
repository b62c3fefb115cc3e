"""Web page of a fleet: running instances, waiting handlers, logged messages, and a replay of any moment.

The server renders it, and updates it by server-sent events; the browser asks no other server. It reads the same data as
the command line, by the same means (`cli`), and changes nothing unless it was started with ``--allow-actions``.
docs/how-to/web.md says how to use it, docs/decisions/0039 why it is made so.
"""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class WebError(ImmortalError):
    """Raised if the page cannot be served, or a request cannot be answered. ``status``: of HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
