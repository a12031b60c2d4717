"""GET /health, /ready and /metrics: whether the process runs, whether its engines serve, and its metrics.

/health depends on no engine, so it answers while engines are away; /ready is refused then.
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
    """What watchers of a proxy ask it."""

    def __init__(self, *, engine: Sampler, metrics: Metrics, auth: Authenticator) -> None:
        self._engine = engine
        self._metrics = metrics
        self._auth = auth

    def routes(self) -> list[Route]:
        """The routes of the app."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The engine answers, with this version; of several, so many serve."""
        served = await self._engine.model_info()
        self._metrics.served_version(served.version)
        answer = {"status": "ok", "version": served.version}
        if isinstance(self._engine, EnginePool) and len(self._engine.replicas) > 1:
            serving = sum(replica.is_serving for replica in self._engine.replicas)
            answer |= {"engines": len(self._engine.replicas), "serving": serving}
        return _json(answer)

    async def metrics(self, request: Request) -> Response:
        """Counts for Prometheus, for the admin only."""
        self._auth.require_admin(request)
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
