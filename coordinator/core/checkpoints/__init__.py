"""Checkpoints: when one is due, how it is taken, which one a recovery begins from."""
