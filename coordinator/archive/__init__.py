"""A log, continuously, in object storage: moments of it, each of which comes back whole (docs/how-to/archive.md).

manifests      what a moment is: the objects it adds, and those it stands on; the bytes that say so
packs          rows of the log as objects
ciphers        objects for the holder of a key alone
chain          moments one after the other: which objects one of them needs, which of them is meant by a time
retention      which moments may go
source         what a log has that an archive has not
archiver       the next moment, from a log to a store; following: again and again
restoring      a moment, from a store to a log

The store is :mod:`coordinator.objects`. Only the command line imports it; the extra ``archive`` has what it needs.
"""
