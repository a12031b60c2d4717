"""The ASGI app of the page: its files, and what it shows as JSON.

Every route but that of the key only reads. The page's files contain nothing of a run and are served to
everybody; everything else needs access. No response may be framed, cached or interpreted as anything but what
it is, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_agents.core.rollout import EpisodeStatus, Split
from areal_agents.errors import ArealAgentsError, RequestError, shown
from areal_agents.store import NotFound, pages
from areal_agents.view.access import Access
from areal_agents.view.changes import CHECK_S, Snapshots
from areal_agents.view.episodes import shown_episode, shown_tokens
from areal_agents.view.metrics import columns_of, names_of
from areal_agents.view.runs import Run, Runs
from areal_agents.view.steps import shown_step
from areal_agents.view.timeline import timeline_of
from areal_agents.view.why import Explainer

STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LARGEST_PAGE = 200  # episodes
_LARGEST_KEY_BODY = 4096  # bytes
_STORE_EVERY_S = 5.0  # shortest time between two events about the store
_ALIVE_S = 15.0  # longest silence of a stream of events


def create_app(runs: Runs, access: Access, *, is_stopping: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Return the app.

    Args:
        runs: the runs that it shows.
        access: who may read.
        is_stopping: whether the server is to end; streams of events then end too.
    """
    routes = _Routes(runs, access, is_stopping)
    app = Starlette(
        routes=routes.routes(), exception_handlers={ArealAgentsError: _refused, HTTPException: _refused}
    )
    app.router.redirect_slashes = False
    return _WithHeaders(app)


class _Routes:
    """The routes. Those that read files or the store are plain functions: Starlette runs them on threads."""

    def __init__(self, runs: Runs, access: Access, is_stopping: Callable[[], bool]) -> None:
        self._runs = runs
        self._access = access
        self._is_stopping = is_stopping
        self._explainer = Explainer()
        self._snapshots = Snapshots()
        # The only files that are served are those that exist now; no path of a request is ever opened.
        self._files = {
            str(path.relative_to(STATIC)): path
            for path in STATIC.rglob("*")
            if path.is_file() and path.suffix in _TYPES
        }

    def routes(self) -> list[Route]:
        run = "/api/runs/{run}"
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/static/{path:path}", self.static, methods=["GET"]),
            Route("/api/session", self.session, methods=["GET"]),
            Route("/api/session", self.sign_in, methods=["POST"]),
            Route("/api/session", self.sign_out, methods=["DELETE"]),
            Route("/api/runs", self.list_runs, methods=["GET"]),
            Route(run, self.show_run, methods=["GET"]),
            Route(f"{run}/curves", self.curves, methods=["GET"]),
            Route(f"{run}/timeline", self.timeline, methods=["GET"]),
            Route(f"{run}/steps/{{step}}", self.step, methods=["GET"]),
            Route(f"{run}/groups/{{group:path}}", self.group, methods=["GET"]),
            Route(f"{run}/episodes", self.episodes, methods=["GET"]),
            Route(f"{run}/episodes/{{episode}}", self.episode, methods=["GET"]),
            Route(f"{run}/episodes/{{episode}}/tokens", self.tokens, methods=["GET"]),
            Route(f"{run}/episodes/{{episode}}/why", self.why, methods=["GET"]),
            Route(f"{run}/events", self.events, methods=["GET"]),
        ]

    def index(self, request: Request) -> Response:
        return _file(self._files["index.html"])

    def static(self, request: Request) -> Response:
        path = self._files.get(request.path_params["path"])
        if path is None:
            raise NotFound("there is no such file")
        return _file(path)

    def session(self, request: Request) -> Response:
        """Say whether a key is needed, and whether the sender has access."""
        return _json({"needs_key": self._access.needs_key, "permitted": self._access.permits(request)})

    async def sign_in(self, request: Request) -> Response:
        """Take the key as {"key": …} and answer with a cookie."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RequestError("send the key as application/json", status=415)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LARGEST_KEY_BODY:
                raise RequestError("the request is too large to be a key", status=413)
        try:
            given = orjson.loads(body)
        except ValueError:
            given = None
        key = given.get("key") if isinstance(given, Mapping) else None
        if not isinstance(key, str) or not self._access.is_key(key):
            raise RequestError("this is not the key of this server", status=401, code="invalid_api_key")
        response = _json({"needs_key": True, "permitted": True})
        self._access.admit(request, response)
        return response

    async def sign_out(self, request: Request) -> Response:
        """Take the cookie back."""
        response = _json({"needs_key": self._access.needs_key, "permitted": False})
        self._access.dismiss(request, response)
        return response

    def list_runs(self, request: Request) -> Response:
        """List the runs, the newest first."""
        self._require(request)
        runs = [run.state() for run in self._runs.all()]
        return _json({"place": str(self._runs.place), "runs": runs})

    def show_run(self, request: Request) -> Response:
        """Show a run: its state, configuration and summary, and what its store has."""
        run = self._run(request)
        out: dict[str, Any] = {**run.state(), "store_problem": None, "episodes": None}
        if out["state"] != "unreadable":
            out |= {"config": _flat(run.config()), "summary": run.summary()}
        try:
            with run.episodes.read() as connection:
                out["episodes"] = pages.counts(connection)
        except ArealAgentsError as error:
            out["store_problem"] = str(error)
        return _json(out)

    def curves(self, request: Request) -> Response:
        """Show some metrics by step, and the evaluations; ?name=…&name=…, and ?after=STEP for later steps."""
        run = self._run(request)
        names = request.query_params.getlist("name")
        if len(names) > 64:
            raise RequestError(f"at most 64 metrics can be shown at once, got {len(names)}", param="name")
        after = _integer(request, "after", -1)
        rows = run.rows()
        chosen = [row for row in rows if row["step"] > after]
        evaluated, problem = [], None
        try:
            with run.store.read() as connection:
                evaluated = pages.evaluations(connection)
        except ArealAgentsError as error:
            problem = str(error)
        return _json(
            {
                "names": names_of(rows),
                "step": [row["step"] for row in chosen],
                "time": [row.get("time") for row in chosen],
                "columns": columns_of(chosen, names),
                "evaluations": evaluated,
                "problem": problem,
            }
        )

    def timeline(self, request: Request) -> Response:
        """Show what the processes of a run did when."""
        return _json(timeline_of(self._run(request)))

    def step(self, request: Request) -> Response:
        """Show the groups that a step trained on, and its metrics."""
        return _json(shown_step(self._run(request), _whole("step", request.path_params["step"])))

    def group(self, request: Request) -> Response:
        """Show a group with its episodes."""
        run = self._run(request)
        with run.episodes.read() as connection:
            return _json(run.with_new_scores(pages.group_of(connection, request.path_params["group"])))

    def episodes(self, request: Request) -> Response:
        """List episodes that match, the newest first; ?before=POSITION goes on."""
        run = self._run(request)
        query = request.query_params
        wanted = pages.EpisodeFilter(
            split=_one_of(request, "split", get_args(Split)),
            status=_one_of(request, "status", get_args(EpisodeStatus)),
            group=query.get("group", ""),
            task=query.get("task", ""),
            min_reward=_number(request, "min_reward"),
            max_reward=_number(request, "max_reward"),
            step=_integer(request, "step", None),
            evaluation=query.get("evaluation", ""),
            has_error={"yes": True, "no": False, None: None}[_one_of(request, "error", ("yes", "no"))],
            tool=query.get("tool", ""),
            text=query.get("text", ""),
        )
        limit = _integer(request, "limit", 50)
        if not 1 <= limit <= _LARGEST_PAGE:
            raise RequestError(f"limit must be from 1 to {_LARGEST_PAGE}, got {limit}", param="limit")
        with run.episodes.read() as connection:
            page = pages.episode_page(
                connection, wanted, before=_integer(request, "before", None), limit=limit
            )
        return _json(page)

    def episode(self, request: Request) -> Response:
        """Show an episode with its turns."""
        return _json(shown_episode(self._run(request), request.path_params["episode"]))

    def tokens(self, request: Request) -> Response:
        """Show the tokens of a branch: ?leaf=TURN, and ?start=NUMBER of the turn to begin with."""
        leaf = request.query_params.get("leaf")
        if not leaf:
            raise RequestError("leaf is required: the id of the branch's last turn", param="leaf")
        start = _integer(request, "start", 0)
        return _json(shown_tokens(self._run(request), request.path_params["episode"], leaf, max(0, start)))

    async def why(self, request: Request) -> Response:
        """Explain the gradient of a token: ?turn=ID, and ?token=INDEX of a sampled token of it."""
        self._require(request)
        run = await asyncio.to_thread(self._runs.get, request.path_params["run"])
        turn, token = request.query_params.get("turn"), _integer(request, "token", None)
        if run.folder is None:
            raise RequestError("a store alone says nothing about training; show the run's folder", status=409)
        if not turn or token is None:
            raise RequestError("turn and token are required", param="token" if turn else "turn")
        episode = request.path_params["episode"]
        return _json(await self._explainer.explain(str(run.folder.root), episode, turn, token))

    async def events(self, request: Request) -> Response:
        """Send an event when the run has changed: "step" for its metrics, "store" for what it records.

        The store of a running run changes all the time, so that its event comes every few seconds only.
        """
        self._require(request)
        run = await asyncio.to_thread(self._runs.get, request.path_params["run"])
        headers = {"content-type": "text/event-stream"}
        return StreamingResponse(self._changes(run), headers=headers)

    async def _changes(self, run: Run) -> AsyncIterator[bytes]:
        seen: dict[str, tuple[Any, ...]] = {}
        silent_s, since_store_s = 0.0, _STORE_EVERY_S
        yield b"retry: 2000\n\n"
        while not self._is_stopping():
            snapshot = await self._snapshots.of(run)
            found = {"step": snapshot.metrics}
            if since_store_s >= _STORE_EVERY_S:
                found["store"] = snapshot.store
            for name, mark in found.items():
                if seen.get(name) != mark:
                    seen[name], silent_s = mark, 0.0
                    since_store_s = 0.0 if name == "store" else since_store_s
                    data = orjson.dumps({"running": snapshot.is_running})
                    yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
            if silent_s >= _ALIVE_S:
                silent_s = 0.0
                yield b": alive\n\n"
            await asyncio.sleep(CHECK_S)
            silent_s += CHECK_S
            since_store_s += CHECK_S

    def _require(self, request: Request) -> None:
        if not self._access.permits(request):
            raise RequestError("this page needs the key of the server", status=401, code="invalid_api_key")

    def _run(self, request: Request) -> Run:
        self._require(request)
        return self._runs.get(request.path_params["run"])


class _WithHeaders:
    """ASGI app that adds the headers of every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _refused(request: Request, error: Exception) -> Response:
    """Return the response to a request that was refused or cannot be answered now."""
    if isinstance(error, RequestError):
        status = error.status
    elif isinstance(error, HTTPException):
        status = error.status_code
    else:
        status = 404 if isinstance(error, NotFound) else 503
    message = error.detail if isinstance(error, HTTPException) else str(error)
    return _json({"error": {"message": message}}, status=status)


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=_TYPES[path.suffix])


def _json(data: Any, *, status: int = 200) -> Response:
    """Return a JSON response; dataclasses become objects, and numbers that are not finite null."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return Response(orjson.dumps(data, option=options), status_code=status, media_type="application/json")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration by dotted keys."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def _one_of(request: Request, name: str, known: tuple[Any, ...]) -> Any:
    value = request.query_params.get(name) or None
    if value is not None and value not in known:
        raise RequestError(f"{name} must be one of {', '.join(known)}, got {shown(value)}", param=name)
    return value


def _integer(request: Request, name: str, default: Any) -> Any:
    value = request.query_params.get(name)
    return _whole(name, value) if value else default


def _whole(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 15:
        raise RequestError(f"{name} must be a whole number, got {shown(value)}", param=name)
    return int(value)


def _number(request: Request, name: str) -> float | None:
    value = request.query_params.get(name)
    if not value:
        return None
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):
        raise RequestError(f"{name} must be a number, got {shown(value)}", param=name)
    return number
