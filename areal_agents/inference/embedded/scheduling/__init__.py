"""Continuous batching: requests, slots, sampling and grammars."""
