"""Groups of episodes: submission under the gate, attempts, and settlement."""
