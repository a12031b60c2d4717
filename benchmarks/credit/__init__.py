"""Measures the expected policy gradient on every shape of forest."""
