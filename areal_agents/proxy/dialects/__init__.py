"""The wire forms that agents speak: one module each, all onto one canonical request and one completer."""
