"""Batches: groups leased from the store, checked, and turned into training data."""
