"""Read the log: one SQL definition of what is live, superseded and settled, and commands to look at it."""
