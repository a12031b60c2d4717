"""Chat formats of models that the `renderers` library does not know, by the model's own chat template."""
