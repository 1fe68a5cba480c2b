"""The Weights & Biases sink."""
