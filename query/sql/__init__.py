"""The views and macros over a root: the one definition of what is live, superseded and settled."""
