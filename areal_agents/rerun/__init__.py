"""Trains again on the episodes of a run, with other settings of the training and without inference."""
