"""Patterns of messaging that stay reliable while processes die, each in a room of its own."""
