"""Scripts that run in SGLang's own Python environment. The rest of this package does not import them."""
