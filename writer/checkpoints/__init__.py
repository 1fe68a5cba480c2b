"""Ids of checkpoints, and the evaluations that are keyed by them."""
