"""The instances of a registry folder: their settings, and what is kept of each beside its log."""
