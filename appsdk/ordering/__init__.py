"""Ordered multicast: the algorithm alone (`docs/explanation/ordering.md`), and what ties it to an app."""
