"""Instances of a registry folder: their settings, and files of each beside its log."""
