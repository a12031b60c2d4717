"""The types that all packages share. They import neither torch nor HTTP libraries, and only `errors` of
ours.
"""
