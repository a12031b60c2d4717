"""Publication of policy versions: a folder, a row in the store, and new weights in every engine.

The folder gets its final name only when it is complete, the row is written before any engine pauses, and an
engine pauses only for the swap. `Publisher.publish` is the only entry point; `config.transport` selects how
weights travel.
"""
