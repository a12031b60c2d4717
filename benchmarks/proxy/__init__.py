"""What the proxy costs for each call."""
