"""Command-line agents, unmodified: one program per episode, which its definition points at the proxy.

A definition (`definitions/*.toml`, or a file of the user's) says as data how a program is found, called and
configured. `prepare.py` turns a definition and an episode into a command line, an environment and files.
"""
