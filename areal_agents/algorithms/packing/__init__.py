"""Packs samples into micro-batches in which shared prefixes are computed once."""
