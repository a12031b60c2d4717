"""Several proxy processes on one store: who owns an episode, and how a request finds its owner."""
