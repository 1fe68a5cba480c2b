"""From a row in memory to a sealed part on storage that fails."""
