"""A saved model over HTTP: `make_app` builds the application, behind the gate that every request passes first.

Pictures to recognise are decoded as they come and then wait in one queue: whatever has arrived when the model is free
goes through it together. Lessons wait in a line of their own, so neither holds up the other.

FastAPI is an extra, so it is imported where it is used; it reads annotations, so those are evaluated there, too.
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fscil._version import __version__
from fscil.errors import UserError
from fscil.serving.batching import Batcher, Busy, Room
from fscil.serving.gate import BUSY, Gate, Refusal, Scope, allowed_names, visitor
from fscil.serving.host import Host, ModelUnavailable
from fscil.serving.operating import add_operations, log_request
from fscil.serving.schemas import Answers, Change, Classes, History, Problem, Undone
from fscil.serving.workers import COLLECTED
from fscil.teachable.recognition import Recognition

OPEN_TO_ALL = ("/health", "/ready", "/docs", "/openapi.json")  # needs no token; the schema is no secret
LESSONS_WAITING = 16  # more are told to come back
REQUESTS_DECODED = 32  # requests whose pictures are decoded in turn; more wait
ABOUT = """Few-shot class-incremental learning: names what pictures show, says **unknown** when it is none of the known
classes, and learns new classes from a few pictures each. Lessons change the model folder at once and for good; `/undo`
takes them back."""

REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem, "description": text}
    for code, text in {
        401: "No token, or a wrong one.",
        413: "More bytes or pictures than allowed.",
        415: "Not a multipart form.",
        422: "Something is missing or cannot be used.",
        503: "Busy: try again after the seconds in Retry-After.",
    }.items()
}


class Metrics:
    """What Prometheus reads; a registry of its own, so that several apps in one process do not mix.

    Of several processes (`serving.workers`) any adds up what all have counted.
    """

    def __init__(self, host: Host):
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

        self.host, self.registry = host, CollectorRegistry()
        own = self.registry
        self.requests = Counter("fscil_requests", "Requests answered.", ["route", "status"], registry=own)
        self.seconds = Histogram("fscil_request_seconds", "From request to answer.", ["route"], registry=own)
        sizes, together = (1, 2, 4, 8, 16, 32, 64, 128), "Pictures that went through the model at once."
        self.batch = Histogram("fscil_batch_pictures", together, buckets=sizes, registry=own)
        waiting = "Requests to recognise that wait for the model."
        self.queue = Gauge("fscil_queue_requests", waiting, multiprocess_mode="livesum", registry=own)
        self.lessons = Counter("fscil_lessons", "Changes made to the model by this process.", ["action"], registry=own)
        self.classes = Gauge("fscil_classes", "Classes known.", multiprocess_mode="mostrecent", registry=own)
        ProcessCollector(registry=own)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        self.classes.set(len(self.host.classes))
        if COLLECTED not in os.environ:
            return generate_latest(self.registry)
        everybody = CollectorRegistry()
        MultiProcessCollector(everybody)
        return generate_latest(everybody)

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts a request that was answered."""
        route = getattr(scope.get("route"), "path", "other")
        self.requests.labels(route, status).inc()
        self.seconds.labels(route).observe(seconds)


class Service:
    """What requests share: the queue to the model, the line of lessons, and the room for pictures."""

    def __init__(self, host: Host, max_batch: int, waiting: int, patience: float):
        self.host, self.metrics = host, Metrics(host)
        self.batcher = Batcher(host, self.metrics, max_batch, waiting, patience)
        self.decoders = ThreadPoolExecutor(REQUESTS_DECODED, "decoding")
        self.teachers = ThreadPoolExecutor(LESSONS_WAITING, "teaching")  # for pictures; lessons themselves take turns
        self.room, self.lessons_waiting = Room(), 0

    @asynccontextmanager
    async def running(self, app: Any) -> AsyncIterator[None]:
        """From the application's start to its end."""
        task = asyncio.create_task(self.batcher.run())
        yield
        task.cancel()
        for pool in (self.decoders, self.batcher.thread, self.teachers):
            pool.shutdown()

    async def recognise(self, asking: str, pictures: list[bytes], top: int) -> list[Recognition]:
        with self.room.take(asking, len(pictures)):
            decoded = await asyncio.get_running_loop().run_in_executor(self.decoders, self.host.decode, pictures)
            return await self.batcher.recognise(decoded, top)

    async def learn(self, asking: str, labels: list[str], pictures: list[bytes], add: bool) -> dict[str, Any]:
        lessons: dict[str, list[bytes]] = {}
        for label, picture in zip(labels, pictures, strict=True):
            lessons.setdefault(label, []).append(picture)
        with self.room.take(asking, len(pictures)):
            return await self.change("learn", self.host.learn_many, lessons, add)

    async def change(self, action: str, lesson: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Waits for a lesson, unless too many wait already."""
        if self.lessons_waiting >= LESSONS_WAITING:
            raise Busy("too many lessons wait already; try again later")
        self.lessons_waiting += 1
        try:
            event = await asyncio.get_running_loop().run_in_executor(self.teachers, lesson, *arguments)
        finally:
            self.lessons_waiting -= 1
        self.metrics.lessons.labels(action).inc()
        return event


def make_app(
    host: Host,
    token: str | None = None,
    address: str = "127.0.0.1",
    *,
    max_batch: int = 32,
    waiting: int = 128,
    patience: float = 0.002,
) -> Gate:
    """The server of one model, behind its gate, for listening at `address`.

    At most `max_batch` pictures go through the model at once and `waiting` requests queue.

    >>> app = make_app(Host("birds"), token="secret")  # doctest: +SKIP
    """
    from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Security
    from fastapi.security import HTTPBearer

    async def refuse_strange_query(request: Request) -> None:
        # `/undo?steps=3`, whose steps belong into the form, would take back one change
        known = {field.alias for field in request.scope["route"].dependant.query_params}
        if strange := sorted(set(request.query_params) - known):
            raise HTTPException(422, f"{strange[0]} is not read from the address here; see /docs for where it goes")

    async def refuse_strange_fields(request: Request) -> None:
        # `naem=heron` beside `name`; `step=3`, or `{"steps": 3}`, which would take back one change
        known = [field.alias for field in request.scope["route"].dependant.body_params]
        if known and (kind := _no_form(request.headers)) and await request.body():
            raise HTTPException(415, f"send a multipart form, not {kind}")
        if known and (strange := sorted(set(await request.form()) - set(known))):
            raise HTTPException(422, f"the form has no field {strange[0][:100]!r}; its fields are {', '.join(known)}")

    service = Service(host, max_batch, waiting, patience)
    guarded = [Security(HTTPBearer(auto_error=False, description="The server's token."))] if token else []
    strict = [Depends(refuse_strange_query), Depends(refuse_strange_fields)]
    routes = APIRouter(dependencies=[*guarded, *strict], responses=REFUSALS)
    _add_work(routes, service)
    _add_views(routes, service)
    app = FastAPI(
        title="fscil",
        version=__version__,
        description=ABOUT,
        lifespan=service.running,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(routes)
    add_operations(app, service.batcher, lambda: gate.closing, __version__)
    _explain_errors(app)

    def ended(scope: Scope, status: int, seconds: float) -> None:
        service.metrics.note(scope, status, seconds)
        log_request(scope, status, seconds)

    gate = Gate(
        app,
        host.limits.request_bytes,
        allowed_names(address, open_to_others=token is not None),
        own_origin=token is None,  # a browser sends no token by itself
        admit=lambda scope: check_token(scope, token),
        ended=ended,
    )
    return gate


def _add_work(routes: Any, service: Service) -> None:
    """The routes that recognise and teach."""
    from fastapi import File, Form, HTTPException, Query, Request, UploadFile

    host = service.host
    Files = Annotated[list[UploadFile], File(description="Pictures: JPEG, PNG, WebP, BMP, GIF or TIFF.")]

    @routes.post("/predict", response_model=Answers, tags=["recognise"])
    async def predict(request: Request, files: Files, top: Annotated[int, Query(ge=1, le=1000)] = 5) -> dict[str, Any]:
        """Name what each picture shows, with a calibrated confidence, or `unknown`.

        A picture that cannot be read has an `error` and does not stop the others.
        """
        pictures = await contents(files, host.limits.pictures)
        found = await service.recognise(visitor(request.scope), pictures, top)
        return {"answers": [item.entry(file.filename or "") for file, item in zip(files, found)]}

    @routes.post("/learn", response_model=Change, tags=["teach"])
    async def learn(
        request: Request,
        files: Files,
        name: Annotated[str | None, Form(description="The class that all pictures show.")] = None,
        names: Annotated[list[str] | None, Form(description="Instead: the class of each picture, in order.")] = None,
        add: Annotated[bool, Form(description="Add pictures to classes that are known already.")] = False,
    ) -> dict[str, Any]:
        """Teach new classes from a few pictures each. When it answers, the lesson is on disk."""
        if name is not None and names is None:
            labels = [name] * len(files)
        elif names is not None and name is None:
            labels = names
        else:
            raise HTTPException(422, "send either name (one for all pictures) or names (one per picture)")
        if len(labels) != len(files):
            raise HTTPException(422, f"there are {len(files)} pictures but {len(labels)} names")
        pictures = await contents(files, host.limits.pictures)
        return await service.learn(visitor(request.scope), labels, pictures, add)

    @routes.post("/forget", response_model=Change, tags=["teach"])
    async def forget(name: Annotated[str, Form(description="The class to remove.")]) -> dict[str, Any]:
        """Remove a class. `/undo` brings it back."""
        return await service.change("forget", host.forget, name)

    @routes.post("/undo", response_model=Undone, tags=["teach"])
    async def undo(
        steps: Annotated[int, Form(ge=1, description="How many changes to take back.")] = 1,
    ) -> dict[str, Any]:
        """Take back the last changes, forgetting included."""
        return await service.change("undo", host.undo, steps)


def _add_views(routes: Any, service: Service) -> None:
    """The routes that only look."""
    from fastapi.responses import Response
    from prometheus_client import CONTENT_TYPE_LATEST

    @routes.get("/classes", response_model=Classes, tags=["look"])
    def classes() -> dict[str, Any]:
        """The classes that are known."""
        return {"classes": service.host.classes}

    @routes.get("/history", response_model=History, tags=["look"])
    def history() -> dict[str, Any]:
        """What was taught when, and how the model did after it."""
        return {"history": service.host.history}

    @routes.get("/metrics", tags=["operate"], response_class=Response)
    def read_metrics() -> Response:
        """Requests, latency, batch sizes, queue, classes, lessons and (of a single process) memory, for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _explain_errors(app: Any) -> None:
    """What goes wrong is answered in one plain sentence."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    @app.exception_handler(Busy)
    async def come_back(request: Request, error: Busy) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503, BUSY)

    @app.exception_handler(UserError)
    async def explain(request: Request, error: UserError) -> JSONResponse:
        ours = isinstance(error, ModelUnavailable) or isinstance(error.__cause__, OSError)  # not the client's doing
        return JSONResponse({"detail": str(error)}, 500 if ours else 422)

    @app.exception_handler(RequestValidationError)
    async def explain_form(request: Request, error: RequestValidationError) -> JSONResponse:
        if request.headers.get("content-type") and (kind := _no_form(request.headers)):
            return JSONResponse({"detail": f"send a multipart form, not {kind}"}, 415)
        said = "; ".join(f"{found['loc'][-1]}: {found['msg']}" for found in error.errors())
        return JSONResponse({"detail": said}, 422)


def _no_form(headers: Mapping[str, str]) -> str | None:
    """What a request with these headers holds instead of a form."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return None if kind in ("multipart/form-data", "application/x-www-form-urlencoded") else kind or "bytes of no type"


def check_token(scope: Scope, token: str | None) -> Refusal | None:
    """Refuses a request without the token, in the same time whatever it says."""
    if token is None or scope["path"] in OPEN_TO_ALL:
        return None
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    kind, _, said = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    digests = (hashlib.sha256(text).digest() for text in (said.strip(), token.encode()))
    if hmac.compare_digest(*digests) and kind.lower() == b"bearer":
        return None
    reason = "wrong token" if said else "a token is needed: send the header Authorization: Bearer TOKEN"
    return Refusal(401, reason, {"www-authenticate": "Bearer"})


async def contents(files: Sequence[Any], most: int) -> list[bytes]:
    if len(files) > most:
        from fastapi import HTTPException

        raise HTTPException(413, f"{len(files)} pictures are too many at once; send at most {most}")
    return [await file.read() for file in files]
