"""vLLM as an engine: the client of its HTTP API, and how to start a server. Nothing here imports vLLM."""
