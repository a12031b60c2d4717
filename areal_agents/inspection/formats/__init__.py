"""Forms in which other programs read episodes, a module for each."""
