"""Nodes and handles (`docs/how-to/nodes.md`): objects of an instance that others call, and references to them."""
