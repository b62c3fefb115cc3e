"""Where each log of a fleet is cut, so that no effect is shown without its cause.

A call that B has logged was made by A before. A's mark in its record r + 1 says how many calls to B the records up to r
had made by then, at least. So, with A cut behind r, B is cut in front of the first call from A with a higher position;
this goes on until nothing changes, since a shorter log of B may lack the causes of others' calls.

A log whose end was the same before and after all other ends were read needs no mark: what others have of it by then was
durable in it, as nothing leaves an instance before its cause is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class LogCut(Struct):
    """``last``: the last record that is shown. ``goes_on``: the log has more, or had as the others were looked at."""

    instance: str
    first: int
    last: int
    goes_on: bool


def make_consistent(database: DuckDBPyConnection, cuts: list[LogCut]) -> None:
    """Cut the logs where they need it. ``database`` has the tables "_logged_messages" and "_logged_outputs", uncut."""
    if len(cuts) < 2 or not any(cut.goes_on for cut in cuts):
        return
    by_name = {cut.instance: cut for cut in cuts}
    while found := _too_late(database, cuts):
        for instance, first_without_cause in found:
            by_name[instance].last = first_without_cause - 1
            by_name[instance].goes_on = True


def _too_late(database: DuckDBPyConnection, cuts: list[LogCut]) -> list[tuple[str, int]]:
    """(instance, its first record with a call whose cause is behind its sender's cut)."""
    database.execute("create or replace temp table _cuts (instance text, first bigint, last bigint, goes_on boolean)")
    database.executemany(
        "insert into _cuts values (?, ?, ?, ?)", [[cut.instance, cut.first, cut.last, cut.goes_on] for cut in cuts]
    )
    # Without a mark in the kept log all was made before that; without one in a whole log, nothing.
    found: list[tuple[str, int]] = database.execute(
        """
        with made as (
            select o.instance as sender, o.destination as receiver, max(o.position) as position
            from _logged_outputs o join _cuts c on c.instance = o.instance
            where o.sequence_id <= c.last + 1
            group by all
        )
        select m.instance, min(m.sequence_id)
        from _logged_messages m
        join _cuts r on r.instance = m.instance and m.sequence_id <= r.last
        join _cuts s on s.instance = m.source and s.goes_on
        left join made on made.sender = m.source and made.receiver = m.instance
        where m.kind = 'stream' and m.source <> m.instance
          and m.position > coalesce(made.position, if(s.first = 0, 0, 9223372036854775807))
        group by m.instance
        """
    ).fetchall()
    return found
