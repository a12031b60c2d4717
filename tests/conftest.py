"""Puts this folder on the import path, so that every test may import `real_tokenizers`."""
