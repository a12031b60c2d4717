"""Model calls: the way of a request from its route to the recorded turn and the answer."""
