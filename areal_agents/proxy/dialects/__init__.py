"""The dialects: the APIs that agents speak, one package each, with one canonical form of a request."""
