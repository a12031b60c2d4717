"""Measures the proxy's cost per call."""
