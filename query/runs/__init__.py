"""What happened to runs: as rows and as a tree, ranked, warned of, and followed."""
