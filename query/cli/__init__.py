"""The commands that look at a root."""
