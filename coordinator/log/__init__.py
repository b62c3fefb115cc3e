"""Durable log of one instance, over a backend. docs/LOG_FORMAT.md specifies its rows.

open.create_log, open_log    open for writing: a store.RowLogStore, which is the core's LogStore
open.open_reader             open for reading beside a live writer: a reader.LogReader

rows.py turns the core's types into rows, view_queries.py turns rows back; backend.py is the interface to backends, and
open.py knows which backends exist. A running coordinator does not import these modules:

verify.verify_log       checks a whole log; reports what is damaged, and the consequences
cut.LogCutter           cuts off the end of a log, and keeps the removed part
verify.back_up          makes a backup, or updates an earlier one
memory.MemoryLogStore   a store in memory that crashes on a test's order
"""

import immortal.protocol  # which says whether modules below run compiled  # noqa: F401
