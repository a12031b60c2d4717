"""Versions of the policy in an object storage: how a trainer writes them there, and how an engine's process
reads them into a folder of its own machine."""
