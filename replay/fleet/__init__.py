"""Replays a fleet under changed code, whose changed calls travel between the services (decision 0092)."""
