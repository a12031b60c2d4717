"""The HTTP side of the embedded engine: SGLang's endpoints."""
