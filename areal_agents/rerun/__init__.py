"""Trains again on the episodes of a run, with other settings and without inference."""
