"""A module for each scheme of environments, whose function `open` takes the line."""
