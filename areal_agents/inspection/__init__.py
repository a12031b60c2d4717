"""Shows runs and episodes, from a run's folder, a store or a proxy, without loading a model."""
