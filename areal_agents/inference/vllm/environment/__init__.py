"""Scripts that run in vLLM's own Python environment. The rest of this package does not import them."""
