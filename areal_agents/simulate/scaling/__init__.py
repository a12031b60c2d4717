"""What clusters of several sizes would need, on paper: GPUs, proxies, the store, the weights, and the cost.

`inputs` has every figure that the estimate begins with and where it comes from, `work` the costs of a model
and of an episode, `cluster` one size, `limits` what it comes near to, and `tables` what is printed.
"""
