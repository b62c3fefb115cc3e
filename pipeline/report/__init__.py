"""Pages and pictures: HTML that needs nothing from elsewhere, SVG, DOT."""
