"""Role processes on the nodes of a Ray cluster: Ray chooses nodes, and no data of a run passes through it."""
