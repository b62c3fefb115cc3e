"""Runs of queries, with checks that they only read.

Calls, signals and random draws are refused where a query tries them. (Timers, effects and awaited answers are
impossible in any ``def`` handler, impulses in any handler.) A changed state is detected after the query:

- An attribute that is another object than before: always, in service and in each replay.
- A change inside an attribute (``self.items.append(...)``): by its bytes, before and after. In tests and in ``immortal
verify`` around each query. In service that would cost more than the query if the state is large, so it has a budget
there, and only queries that run for the first time are compared: a replay must accept what was accepted once. A query
that is not logged has a larger budget: no replay repeats its changes.

Such a query fails, and the state is restored: as for any message that is undone or, for a query that is not logged,
from the log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct, field

from immortal.appsdk.calls.context import QUERY_RUNS, Context
from immortal.appsdk.errors import QueryError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.state.schema import StateSchema

COMPARED_BYTES_PER_QUERY = 8 << 10
"""Mean bytes of state encoded for one query, before and after: at 4 KiB all are compared, at 1 MiB each 256th."""
UNLOGGED_COMPARED_BYTES_PER_QUERY = 64 << 10
"""The same for queries that are not logged: at 32 KiB all are compared, at 1 MiB each 32nd."""
COMPARED_SIZE_BYTES_MAX = 1 << 20
"""Largest state, at its last copy, that is compared: to encode a larger one even once would be noticeable."""

_UNSET = object()


class _Budget(Struct):
    """Budget of bytes for comparisons.

    ``compared``: IDs of methods of which a query was compared; the first query of each method always is.
    """

    bytes_per_query: int
    owed_bytes: int = 0
    compared: set[int] = field(default_factory=set)

    def allows(self, method_id: int) -> bool:
        self.owed_bytes = max(0, self.owed_bytes - self.bytes_per_query)
        return not self.owed_bytes or method_id not in self.compared

    def note(self, method_id: int, size_bytes: int) -> None:
        self.compared.add(method_id)
        self.owed_bytes += size_bytes


class Queries:
    """Runner of one instance's queries. ``is_live``: the log has been replayed; new queries follow.

    ``passed``: the last (record, message) that was handled before, while a rewind replays. ``run_limited``: runs a
    query that is not logged, with a time limit. ``compares_all``: compare around each query, in replays too.
    ``state_size_bytes``: size of the state when it was last encoded.
    """

    def __init__(self, context: Context) -> None:
        self.is_live = False
        self.passed = (-1, 0)
        self.run_limited: Callable[[Callable[[], Any]], Any] = lambda query: query()
        self.compares_all = False
        self.state_size_bytes = 0
        self._context = context
        self._schema: StateSchema | None = None
        self._logged = _Budget(COMPARED_BYTES_PER_QUERY)
        self._unlogged = _Budget(UNLOGGED_COMPARED_BYTES_PER_QUERY)

    def use(self, schema: StateSchema) -> None:
        """Use ``schema`` for the state from here on."""
        self._schema = schema

    def run(self, handler: Handler[Any, Any], instance: Any, *arguments: Any) -> Any:
        """Run a query and return its result. Raises what it raises, and QueryError if it changed the state."""
        return self._run(handler, instance, partial(handler.call, instance, *arguments), self._budget_if_due(handler))

    def run_unlogged(self, handler: Handler[Any, Any], instance: Any, arguments: tuple[Any, ...]) -> Any:
        """Run a query between two messages, like :meth:`run`, without a log entry."""
        is_small = self.state_size_bytes <= COMPARED_SIZE_BYTES_MAX
        is_due = self.compares_all or (is_small and self._unlogged.allows(handler.method_id))
        function = partial(handler.call, instance, *arguments)
        return self._run(handler, instance, lambda: self.run_limited(function), self._unlogged if is_due else None)

    def _run(
        self, handler: Handler[Any, Any], instance: Any, function: Callable[[], Any], budget: _Budget | None
    ) -> Any:
        context, attributes = self._context, vars(instance)
        before = attributes.copy()
        forms = None if budget is None else self._encoded_attributes(instance)
        thread_id, context.handling_thread_id = context.handling_thread_id, QUERY_RUNS
        try:
            return function()
        finally:
            context.handling_thread_id = thread_id
            changed = self._replaced_attributes(before, attributes)
            if not changed and budget is not None and forms is not None:
                budget.note(handler.method_id, 2 * sum(map(len, forms.values())))
                changed = self._changed_attributes(instance, forms)
            if changed:
                error = QueryError(
                    f"{handler.function.__qualname__} is a query, which only reads, and has changed "
                    f"{', '.join(changed)}: make it an @rpc method, or let it work on a copy"
                )
                error.changed = True
                raise error

    def _replaced_attributes(self, before: dict[str, Any], attributes: dict[str, Any]) -> list[str]:
        schema = self._schema
        if schema is None or schema.serializer == "own":  # then the attributes are not the saved state
            return []
        return [
            f"self.{name}"
            for name in {**before, **attributes}
            if before.get(name, _UNSET) is not attributes.get(name, _UNSET) and name not in schema.transient
        ]

    def _budget_if_due(self, handler: Handler[Any, Any]) -> _Budget | None:
        """Return the budget for the comparison of a logged query; None: it is not compared."""
        if self.compares_all:
            return self._logged
        if not self.handles_new or self.state_size_bytes > COMPARED_SIZE_BYTES_MAX:
            return None
        return self._logged if self._logged.allows(handler.method_id) else None

    @property
    def handles_new(self) -> bool:
        """True if the current message is handled for the first time, not in a replay."""
        return self.is_live and (self._context.sequence_id, self._context.message_index) > self.passed

    def _encoded_attributes(self, instance: Any) -> dict[str, bytes] | None:
        """Return the attributes' bytes; None if one can't be encoded: the next checkpoint reports why."""
        if self._schema is None:
            return None
        try:
            return self._context.run_contexts.run(self._schema.forms, instance)
        except Exception:
            return None

    def _changed_attributes(self, instance: Any, before: dict[str, bytes]) -> list[str]:
        after = self._encoded_attributes(instance)
        if after is None:
            return ["what its state holds: it can't be saved any more"]
        return [f"self.{name}" if name else "its state" for name in before if before[name] != after.get(name)]
