"""Runs on several machines: the places of their processes, and the launchers that put them on machines."""
