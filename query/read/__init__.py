"""The files of a root, sealed and open, read again and again as Arrow."""
