"""Runs the agent of each episode as a job that a cluster's scheduler places, from the user's template."""
