"""Command-line agents that are driven turn by turn, in the Agent Client Protocol (ACP).

`session.py` starts an agent and prompts it, `connection.py` speaks the protocol with it, `reply.py` is what
it did in a turn. The package of the protocol is imported where an agent is started, because it is an extra.
"""
