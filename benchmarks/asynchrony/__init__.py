"""Measures what asynchrony gains over a synchronous run."""
