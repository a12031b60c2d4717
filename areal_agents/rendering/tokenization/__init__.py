"""Converts text to token ids and back, and bounds the number of tokens of a text."""
