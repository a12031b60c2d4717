"""Collects groups of training episodes: submission under the gate, attempts, and completion."""
