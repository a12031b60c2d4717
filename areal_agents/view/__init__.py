"""A page in the browser that shows runs: curves, timelines, groups, episodes and every token.

It only reads: the folders of runs, and their stores over connections that cannot write.
"""
