"""Scripts that run in the environment that has SGLang. Nothing of this package imports them."""
