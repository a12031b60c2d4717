"""Packing: samples into micro-batches, with shared prefixes computed once."""
