"""Ordered multicast: the algorithm alone (`docs/ORDERING.md`), and what ties it to an app."""
