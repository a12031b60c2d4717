"""What the examples share to build a small policy from nothing: network, tokenizer, copying, imitation.

The folder `examples` must be on the path: `PYTHONPATH=examples python examples/search_agent/make_model.py`.
"""
