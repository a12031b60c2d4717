"""Text to token ids and back, and bounds on the number of tokens."""
