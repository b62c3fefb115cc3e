"""Reads the handlers of a class, and finds what a replay would not repeat."""
