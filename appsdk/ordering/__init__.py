"""Ordered multicast: the pure algorithm (`docs/explanation/ordering.md`), and its connection to an app."""
