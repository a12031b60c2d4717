"""SGLang: the client of its HTTP protocol, and how its server is started."""
