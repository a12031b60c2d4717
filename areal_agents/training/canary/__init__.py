"""The canary of a trainer: candidates, what is known of them, and what becomes of them."""
