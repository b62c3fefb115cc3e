"""Plain values and texts of records, status, handlers and comparisons, which both commands and web pages show."""
