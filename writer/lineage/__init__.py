"""Which run and segment a process becomes, and what the log says of it."""
