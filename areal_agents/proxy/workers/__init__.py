"""Several proxy processes on one store: which process owns an episode, and how requests reach it."""
