"""Runs the agent of each episode as a job that a cluster's scheduler places, from a template of the user."""
