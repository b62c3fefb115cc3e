"""Patterns of messaging that stay reliable while processes die, each in its own package."""
