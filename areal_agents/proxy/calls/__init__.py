"""Model calls: from the route of a request to the recorded turn and the answer."""
