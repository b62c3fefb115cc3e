"""Security audit: who was refused, and what operators did. Each instance has one audit log."""
