"""Runs a user's agent: in this process, in worker processes, or as a program of its own."""
