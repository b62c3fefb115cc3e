"""Archives: moments of a log in object storage, made as it grows, each restorable as a whole (docs/how-to/archive.md).

format         manifests of moments, packs of rows, errors
archive        the archive of one instance; encryption of its objects
chain          which objects a moment needs, which moment belongs to a time, which moments may go (retention)
archiver       makes the next moment of a log; follower: again and again
restore        makes a log of a moment
place, view    an archive as a read-only log

The store is :mod:`coordinator.objects`. Only the command line imports this package; the extra ``archive`` has what it
needs.
"""
