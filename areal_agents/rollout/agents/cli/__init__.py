"""Command-line agents, unmodified: one program per episode, which a seam points at the proxy.

A seam (`seams/*.toml`, or a file of the user's) says as data how a program is found, called and configured.
`prepare.py` turns a seam and an episode into a command line, an environment and files.
"""
