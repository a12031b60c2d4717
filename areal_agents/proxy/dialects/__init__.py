"""The APIs that agents speak: one package each, all with one canonical request and one completer."""
