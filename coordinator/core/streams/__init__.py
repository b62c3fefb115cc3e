"""The streams of one instance: to others, from others, and to itself."""
