"""Peers of an instance: their discovery, keys and permissions, and the frames to and from them."""
