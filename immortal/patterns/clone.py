"""A table and its live copies. `docs/patterns/clone.md`."""

from immortal.appsdk.patterns.clone import *  # noqa: F403
from immortal.appsdk.patterns.clone import __all__ as __all__

if __name__ == "__main__":
    import sys

    from immortal.appsdk.patterns.clone.__main__ import main

    sys.exit(main())
