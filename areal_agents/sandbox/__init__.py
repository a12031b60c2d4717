"""Sandboxes for agents and graders: one interface, several isolations.

`open_isolation` (isolations.py) checks that the machine has what an isolation needs. An isolation starts
sandboxes from a `SandboxSpec`; a sandbox runs commands one at a time (sandbox.py).
"""
