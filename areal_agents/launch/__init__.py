"""Starts, watches and ends the processes of a run on one machine, and shows its progress."""
