"""What is done to a root after its writers are gone: check, seal, join."""
