"""The part that runs in the trainer: it appends to the log, and never waits for anything."""
