"""Sandboxes on other machines: a host serves those of its machine, and rollout processes use them."""
