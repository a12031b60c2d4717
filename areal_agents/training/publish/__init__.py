"""Publication of policy versions: a folder, a row in the store, and new weights in every engine.

The folder is complete before it has its name, the row is written before an engine pauses, and an engine
pauses for nothing but the swap. `Publisher.publish` is the only entry point; `config.transport` selects
how weights travel.
"""
