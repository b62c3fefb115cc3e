"""Instance and its coordinator in one process. `docs/how-to/embedded.md`."""

from immortal.appsdk.embedded import *  # noqa: F403
from immortal.appsdk.embedded import __all__ as __all__
