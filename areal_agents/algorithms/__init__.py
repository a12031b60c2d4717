"""Pure functions that turn groups of episodes into a loss.

Nothing here talks to a store, an engine or a process group: arrays in, arrays out, and every
formula with its source in the docstring of the function that computes it.
"""
