"""Pure functions that turn groups of episodes into a loss.

No function accesses a store, an engine or a process group: all of them map arrays to arrays. The docstring of
the function that computes a formula names the formula's source.
"""
