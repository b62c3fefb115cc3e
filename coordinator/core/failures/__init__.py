"""Calls that fail: verdicts, dead letters, poison messages, states that cannot be saved."""
