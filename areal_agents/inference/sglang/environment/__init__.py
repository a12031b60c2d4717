"""What runs in the environment that has SGLang: scripts of their own, which nothing here imports."""
