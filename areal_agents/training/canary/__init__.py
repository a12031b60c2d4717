"""The canary of a trainer: candidates, their scores, and the verdicts on them."""
