"""Determinism check: reads the handlers of a class and finds code that a replay would not repeat."""
