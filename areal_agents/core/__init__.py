"""The types that every room shares. No torch, no HTTP, no import of ours but errors."""
