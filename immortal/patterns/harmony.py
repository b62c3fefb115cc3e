"""Batches over a cluster of workers. `docs/patterns/harmony.md`."""

from immortal.appsdk.patterns.harmony import *  # noqa: F403
from immortal.appsdk.patterns.harmony import __all__ as __all__

if __name__ == "__main__":
    import sys

    from immortal.appsdk.patterns.harmony.__main__ import main

    sys.exit(main())
