"""Publishes a policy version: a folder, a row in the store, and new weights in each engine.

The folder is complete before it has its name, the row is written before an engine pauses, and an engine
pauses for nothing but the swap. `Publisher.publish` is the one way in; `config.transport` says how.
"""
