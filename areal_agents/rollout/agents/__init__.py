"""Runs a user's agent as a coroutine in this process, in worker processes, or as a separate program."""
