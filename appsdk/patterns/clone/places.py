"""Where a table is published: as the table says, or as given by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from immortal.appsdk.client import with_timeout
from immortal.appsdk.client.errors import CallTimeout, ClientError, NotConnectable
from immortal.appsdk.client.places import Finder
from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.records import Place


@dataclass
class Access:
    """How a client gets to a table and its publishers; as of :func:`immortal.appsdk.client.connect`.

    ``publishers``: endpoints, in place of those that the table names; ``NAME@tcp://...`` where NAME's keys are shown.
    ``blocks``: of those that the table names, only where clients may hold up writers.
    """

    table: str
    home: str | os.PathLike[str] | None = None
    identity: str | None = None
    server_keys: Sequence[str] = ()
    insecure: bool = False
    publishers: Sequence[str] = ()
    blocks: bool = False

    def finder(self, place: Place) -> Finder:
        name = place.identity or self.table
        keys = () if place.identity else self.server_keys
        return Finder(name, self.home, (place.endpoint,), keys, self.identity, self.insecure)


@dataclass
class Places:
    """``table``: a proxy of it; None: only those that are given are known."""

    access: Access
    table: Any = None
    _known: list[Place] = field(default_factory=list)

    def find(self, anew: bool) -> Sequence[Place]:
        """Raises NotConnectable."""
        if self.access.publishers:
            return [_place(text) for text in self.access.publishers]
        if self._known and not anew:
            return self._known
        try:
            found = with_timeout(self.table, limits.CONNECT_S).places()
            self._known = [place for place in found if place.may_block or not self.access.blocks] or list(found)
        except (CallTimeout, NotConnectable) as error:
            if not self._known:  # the table is away; its forwarders may be there
                raise NotConnectable(str(error)) from None
        except ClientError as error:
            raise NotConnectable(f"{self.access.table!r} is no table of this version: {error}") from None
        return self._known


def _place(text: str) -> Place:
    name, at, endpoint = text.partition("@tcp://")
    return Place(f"tcp://{endpoint}", name) if at else Place(text)
