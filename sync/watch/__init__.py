"""A sync that goes on: what changed, what stalled, who is told, and how far each tracker is."""
