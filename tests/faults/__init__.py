"""Fault matrix on a real disk: the effect of each kind of disk failure on each kind of thing on the disk."""
