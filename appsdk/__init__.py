"""SDK: runs the class of a service, and has its clients, tests and patterns. Programs import :mod:`immortal`."""

import immortal.protocol  # which says whether modules below run compiled  # noqa: F401
