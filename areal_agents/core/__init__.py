"""The types that every package shares. They use neither torch nor HTTP, and import only `errors` of ours."""
