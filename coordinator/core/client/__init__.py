"""Clients without a log: their requests, sessions and queries."""
