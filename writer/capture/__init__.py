"""What a training loop measures: reduced over ranks, how often, and what it will cost."""
