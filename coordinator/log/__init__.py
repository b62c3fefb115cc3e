"""The durable log of one instance, over a backend. docs/LOG_FORMAT.md specifies its rows.

open.create_log, open_log    open for writing: a store.RowLogStore, which is the core's LogStore
open.open_reader             open for reading beside a live writer: a reader.LogReader

rows.py turns the core's types into rows, view_queries.py turns rows back; backend.py is the interface to backends, and
open.py knows which backends exist. A running coordinator does not import these modules:

verify.verify_log       walks over a whole log; reports what is damaged, and what that means
cut.LogCutter           cuts the end of a log off, and keeps what it cuts
backup.back_up          makes a copy, or updates an earlier one
memory.MemoryLogStore   a store in memory that crashes, fails and rots when a test says so
"""
