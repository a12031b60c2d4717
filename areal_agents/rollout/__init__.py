"""Runs agents: groups of training episodes under the staleness gate, and evaluations.

This package calls the proxy over HTTP only, and only reads the store. This module imports nothing, so that
the worker processes of synchronous agents start fast.
"""
