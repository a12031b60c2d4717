"""A small continuous-batching engine that speaks SGLang's protocol, for one machine and for tests.

The HTTP side runs in the main thread's event loop; the scheduler and the model run in a thread of their own
and are reached only through `worker.EngineThread`.
"""
