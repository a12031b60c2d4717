"""Renders models that the `renderers` library does not know with the chat template in their folder."""
