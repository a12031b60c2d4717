"""The forward pass: architectures, weights, adapters, and the runners that compute."""
