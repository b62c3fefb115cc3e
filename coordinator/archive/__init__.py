"""Archives of logs in object storage: moments of a growing log, each restorable as a whole (docs/how-to/archive.md).

format         manifests of moments, packs of rows, the chain of moments, retention, errors
archive        the archive of one instance, encryption of its objects, restore and view of a moment
archiver       makes the next moment of a log
follower       archives a log as it grows, prunes old moments
place          an archive as a read-only log

The store is :mod:`coordinator.objects`. Only the command line imports this package; the extra ``archive`` installs the
packages that it needs.
"""
