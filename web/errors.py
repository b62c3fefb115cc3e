"""Errors of the page."""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class WebError(ImmortalError):
    """The page cannot be served, or a request cannot be answered. ``status``: of HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
