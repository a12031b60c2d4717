"""Episodes in the proxy: sessions in memory, the control API, implicit episodes, and timeouts."""
