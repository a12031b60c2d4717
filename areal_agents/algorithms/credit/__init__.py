"""Credit assignment: computes the advantage of each trained token from the rewards of an episode. NumPy only.

`rewards.py` shapes what was given, `returns.py` says what each turn has earned, `advantages.py` compares it
within a group, `tokens.py` carries advantages to single tokens where a critic or a penalty needs that.
"""
