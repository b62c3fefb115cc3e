"""An instance and its coordinator in one process. `docs/how-to/embedded.md`."""

from immortal.appsdk.embedded import Embedded, run, start

__all__ = [
    "Embedded",
    "run",
    "start",
]
