"""Evaluations: metrics, results, comparisons of two of them, and new rewards for stored episodes."""
