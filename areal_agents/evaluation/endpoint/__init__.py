"""Evaluates the model of another server, without an engine or a proxy of ours."""
