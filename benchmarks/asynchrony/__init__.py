"""What asynchrony gains over a synchronous run."""
