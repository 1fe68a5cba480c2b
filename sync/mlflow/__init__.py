"""The MLflow sink."""
