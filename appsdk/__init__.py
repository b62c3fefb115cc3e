"""SDK: runs the class of a service, and has its clients, tests and patterns. Programs import :mod:`immortal`."""
