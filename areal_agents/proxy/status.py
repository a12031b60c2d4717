"""GET /health, /ready and /metrics: whether the process runs, whether its engines serve, and its metrics.

/health does not depend on the engines; /ready gets an error while no engine serves.
"""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_agents.inference import Sampler
from areal_agents.inference.pool import EnginePool
from areal_agents.proxy.auth import Authenticator
from areal_agents.proxy.metrics import CONTENT_TYPE, Metrics


class StatusRoutes:
    """The routes for monitoring a proxy."""

    def __init__(self, *, engine: Sampler, metrics: Metrics, auth: Authenticator) -> None:
        self._engine = engine
        self._metrics = metrics
        self._auth = auth

    def routes(self) -> list[Route]:
        """Return the routes of the app."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """GET /health: answer that the process runs."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: answer with the served version and, of several engines, with how many serve."""
        served = await self._engine.model_info()
        self._metrics.served_version(served.version)
        answer = {"status": "ok", "version": served.version}
        if isinstance(self._engine, EnginePool) and len(self._engine.replicas) > 1:
            serving = sum(replica.is_serving for replica in self._engine.replicas)
            answer |= {"engines": len(self._engine.replicas), "serving": serving}
        return _json(answer)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: answer with the metrics in Prometheus' text format; needs the admin key."""
        self._auth.require_admin(request)
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
