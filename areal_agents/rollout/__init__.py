"""Runs agents: episodes of tasks in groups, under the staleness gate, and evaluations.

It knows the proxy only over HTTP and the store only by reading. Nothing is imported here, so that
the worker processes of synchronous agents start fast.
"""
