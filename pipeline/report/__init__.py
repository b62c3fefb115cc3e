"""Pages and pictures: HTML without references to other files, SVG, DOT."""
