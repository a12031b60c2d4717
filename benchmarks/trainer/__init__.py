"""Speed and memory of the trainer."""
