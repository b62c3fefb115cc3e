"""Plain values and texts for records, status, handlers and comparisons, which both commands and web pages show."""
