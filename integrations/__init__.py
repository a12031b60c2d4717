"""Agents of other frameworks, one folder each, and the table of what is recorded of them:
`python -m integrations --help`."""
