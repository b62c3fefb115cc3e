"""The SDK: what runs a service's class, and its clients, tests and patterns. Programs import :mod:`immortal`."""
