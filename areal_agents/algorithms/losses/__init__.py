"""The policy's loss and its parts: the losses, one per file, the corrections, trust regions and
normalisation.

Each file of a loss holds its formula as a function of values, its source, and its settings; `registry.py`
lists the losses. The settings are read by processes that have no torch, so those files import torch for its
types only and compute with the methods of tensors.
"""
