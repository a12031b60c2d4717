"""Environments: tasks with a grader, and sometimes tools, that a configuration names in one line.

`line.py` reads the line, `environment.py` says what an environment is and opens one, a module in `adapters/`
for each scheme adapts what its users have, and `players.py` has the agents that play where an environment has
none. An environment whose package is in another interpreter runs there (`host.py`).
"""
