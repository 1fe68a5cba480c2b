"""What of a run belongs where in a tracker, and how it gets there: once, and read back."""
