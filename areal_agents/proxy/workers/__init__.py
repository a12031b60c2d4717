"""Several proxy processes on one store: which one owns an episode, and how requests reach it."""
