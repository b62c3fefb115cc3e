"""Ordered multicast: the algorithm alone (`docs/explanation/ordering.md`), and its connection to an app."""
