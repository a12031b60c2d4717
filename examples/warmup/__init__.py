"""What the examples share to build a small policy from nothing: network, tokenizer, copying, imitation.

A `make_model.py` has what is its own: the texts of its tokenizer, its stages, their rates and bars. The
folder `examples` must be on the path: `PYTHONPATH=examples python examples/search_agent/make_model.py`.
Nothing that a run loads is here: a run has only the folder of its example on the path, which can be copied.
"""
