"""Replay the log into Weights & Biases or MLflow: exactly once, at the original times, verified."""
