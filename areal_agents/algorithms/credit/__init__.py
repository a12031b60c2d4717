"""Computes the advantage of each trained token from the rewards of an episode, with NumPy only.

`rewards.py` shapes the recorded rewards, `returns.py` computes the return of each turn, `advantages.py`
compares the returns within a group, and `tokens.py` computes advantages of single tokens if there is a critic
or a penalty per token.
"""
