"""New weights: how they arrive, how they are verified, and how they replace the old ones."""
