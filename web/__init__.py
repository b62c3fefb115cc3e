"""The page of a fleet: what runs, what waits, what was logged, and any moment of it once more.

Rendered here, live by server-sent events; the browser asks nobody else. It reads what the command line reads, by the
same means (`cli`), and changes nothing unless it was started with ``--allow-actions``. docs/how-to/web.md
says how it is used, docs/decisions/0039 why it is made so.
"""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class WebError(ImmortalError):
    """The page cannot be served, or a request cannot be answered. ``status``: of HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
