"""The fault matrix on a real disk: what each kind of failure of the disk does to each kind of thing on it."""
