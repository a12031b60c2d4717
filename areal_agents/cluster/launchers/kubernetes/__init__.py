"""A run on Kubernetes: its manifests, made from the configuration, which `kubectl apply` creates."""
