"""A saved model over HTTP: `make_app` builds the FastAPI application, `serve` runs it until it is told to stop.

Every request passes the `Door` (who may, how much, how many at once; counted for Prometheus) before a byte of its body
is kept. Pictures to recognise are decoded as they come and then wait in one queue: whatever has arrived when the model
is free goes through it together. Lessons wait in a line of their own, so neither holds up the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, FastAPI, File, Form, Query, Security, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import generate_latest as prometheus_text
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fscil._version import __version__
from fscil.errors import UserError
from fscil.serving.host import Host
from fscil.serving.listening import LOCAL_NAMES, from_elsewhere
from fscil.teachable.recognition import Recognition

OPEN_TO_ALL = ("/health", "/docs", "/openapi.json")  # needs no token; the schema is no secret
BODIES_AT_ONCE = 4  # memory for uploads, in largest requests
LESSONS_WAITING = 16  # more are told to come back
BUSY = {"Retry-After": "1"}


# ---- what is answered -----------------------------------------------------------------------------------------------
class Guess(BaseModel):
    label: str | int
    probability: float


class Answer(BaseModel):
    """What one picture shows, as `fscil predict --json` has it."""

    file: str = Field(description="The name it was sent under.")
    label: str | None = Field(description='The class, "unknown", or null if the picture could not be read.')
    confidence: float = Field(description="Calibrated probability of the best class.")
    unknown: bool = Field(description="Whether it shows none of the known classes.")
    top: list[Guess] = Field(description="The best classes, best first.")
    error: str | None = Field(description="Why the picture could not be read.")


class Answers(BaseModel):
    answers: list[Answer] = Field(description="One per picture, in the order they were sent.")


class Event(BaseModel):
    """One change of the model."""

    action: str = Field(examples=["learn"])
    when: str = Field(examples=["2025-01-31T12:00:00Z"])
    classes: dict[str, int] = Field(description="Pictures per class that the change was about.")
    known: int = Field(description="Classes known after it.")
    held_out_accuracy: float | None = Field(None, description="Accuracy on held-out base pictures after it.")
    held_out_rejection: float | None = Field(None, description="Share of them called unknown.")
    taught_rejection: float | None = Field(None, description="Share of taught pictures called unknown.")


class Change(Event):
    notes: list[str] = Field(description="Worth knowing: pictures given twice, a class taught from one picture.")


class Undone(BaseModel):
    undone: list[Event] = Field(description="The changes taken back, latest first.")
    known: int = Field(description="Classes known now.")


class Known(BaseModel):
    name: str | int
    pictures: int
    base: bool = Field(description="Of the base classes, or taught later.")
    since: str


class Classes(BaseModel):
    classes: list[Known]


class History(BaseModel):
    history: list[Event] = Field(description="The base classes first; what was undone is not in it.")


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    version: str


class Problem(BaseModel):
    detail: str = Field(description="One plain sentence.")


# ---- measuring ------------------------------------------------------------------------------------------------------
class Metrics:
    """What Prometheus reads; a registry of its own, so that several apps in one process do not mix."""

    def __init__(self, host: Host):
        self.registry = CollectorRegistry()
        own = dict(registry=self.registry)
        self.requests = Counter("fscil_requests", "Requests answered.", ["route", "status"], **own)
        self.seconds = Histogram("fscil_request_seconds", "From request to answer.", ["route"], **own)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batch = Histogram(
            "fscil_batch_pictures", "Pictures that went through the model at once.", buckets=sizes, **own
        )
        self.queue = Gauge("fscil_queue_requests", "Requests to recognise that wait for the model.", **own)
        self.lessons = Counter("fscil_lessons", "Changes made to the model by this process.", ["action"], **own)
        Gauge("fscil_classes", "Classes known.", **own).set_function(lambda: len(host.classes))
        ProcessCollector(registry=self.registry)


# ---- recognising together -------------------------------------------------------------------------------------------
@dataclass
class _Job:
    pictures: list[np.ndarray | str]
    top: int
    answer: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Requests that wait at the same time share a forward pass; one thread runs them.

    While the model is busy they gather by themselves; if it is free, the first waits `patience` seconds for others. At
    most `max_batch` pictures go together, unless a single request has more.
    """

    def __init__(self, host: Host, metrics: Metrics, max_batch: int = 32, waiting: int = 128, patience: float = 0.002):
        self.host, self.metrics, self.max_batch, self.patience = host, metrics, max_batch, patience
        self.queue: asyncio.Queue[_Job] = asyncio.Queue(waiting)
        self.thread = ThreadPoolExecutor(1, "recognising")
        self.left_over: _Job | None = None  # taken from the queue but too large for the last batch

    async def recognise(self, pictures: list[np.ndarray | str], top: int) -> list[Recognition]:
        job = _Job(pictures, top)
        try:
            self.queue.put_nowait(job)
        except asyncio.QueueFull:
            raise HTTPException(503, "too many requests wait already; try again in a second", BUSY) from None
        self.metrics.queue.set(self.queue.qsize())
        return await job.answer

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            jobs = await self._gather()
            self.metrics.queue.set(self.queue.qsize())
            self.metrics.batch.observe(sum(len(job.pictures) for job in jobs))
            if not await self._answer(jobs) and len(jobs) > 1:
                for job in jobs:  # one picture that fails must not fail the others' requests
                    await self._answer([job])

    async def _gather(self) -> list[_Job]:
        jobs = [self.left_over or await self.queue.get()]
        self.left_over = None
        self._join(jobs)
        if self.left_over is None and sum(len(job.pictures) for job in jobs) < self.max_batch:
            await asyncio.sleep(self.patience)
            self._join(jobs)
        return jobs

    def _join(self, jobs: list[_Job]) -> None:
        """Adds what waits in the queue as long as it fits."""
        count = sum(len(job.pictures) for job in jobs)
        while self.left_over is None and not self.queue.empty():
            job = self.queue.get_nowait()
            count += len(job.pictures)
            if count > self.max_batch:
                self.left_over = job
            else:
                jobs.append(job)

    async def _answer(self, jobs: Sequence[_Job]) -> bool:
        """Answers the jobs; of several that fail together none is answered and the result is False."""
        together, top = [item for job in jobs for item in job.pictures], max(job.top for job in jobs)
        loop = asyncio.get_running_loop()
        try:
            found = iter(await loop.run_in_executor(self.thread, self.host.recognise_decoded, together, top))
        except Exception as error:
            if len(jobs) == 1 and not jobs[0].answer.done():
                jobs[0].answer.set_exception(error)
            return False
        for job in jobs:
            own = [next(found) for _ in job.pictures]
            if not job.answer.done():  # else the client has gone
                job.answer.set_result([replace(item, top=item.top[: job.top]) for item in own])
        return True


# ---- the door -------------------------------------------------------------------------------------------------------
class Door:
    """Lets a request in if it may enter, bounds its body while it is read, and counts it.

    Without a token only this machine is served, and only requests that were meant for it: a page of another site that
    sends a form to localhost, or whose name was made to point here, is refused.
    """

    def __init__(self, app: ASGIApp, token: str | None, request_bytes: int, metrics: Metrics):
        self.app, self.metrics, self.request_bytes = app, metrics, request_bytes
        self.token = hashlib.sha256(token.encode()).digest() if token else None
        self.held = 0  # bytes of all bodies that are being worked on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status, own = time.perf_counter(), 500, 0

        async def counted_receive() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            own, self.held = own + size, self.held + size
            if own > self.request_bytes:
                raise self._too_large()
            if self.held > BODIES_AT_ONCE * self.request_bytes:
                raise HTTPException(503, "too much is being sent at once; try again in a second", BUSY)
            return message

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            request = Request(scope)
            refusal = self._refusal(request)
            if refusal is None:
                await self.app(scope, counted_receive, noted_send)
            else:
                answer = JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)
                await answer(scope, receive, noted_send)
        finally:
            self.held -= own
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    def _refusal(self, request: Request) -> HTTPException | None:
        headers = request.headers
        if self.token is not None and request.url.path not in OPEN_TO_ALL:
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(hashlib.sha256(given.strip().encode("latin-1")).digest(), self.token)
            if kind.lower() != "bearer" or not right:
                said = "wrong token" if given else "a token is needed: send the header Authorization: Bearer TOKEN"
                return HTTPException(401, said, {"WWW-Authenticate": "Bearer"})
        if self.token is None:
            elsewhere = from_elsewhere(headers.get("origin"), headers.get("host"))
            if request.url.hostname not in LOCAL_NAMES or elsewhere:
                return HTTPException(403, "without a token only requests from this machine's own pages are answered")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.request_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the request is larger than the {self.request_bytes / 1e6:g} MB allowed")


# ---- the application ------------------------------------------------------------------------------------------------
ABOUT = """Few-shot class-incremental learning: names what pictures show, says **unknown** when it is none of the known
classes, and learns new classes from a few pictures each. Lessons change the model folder at once and for good; `/undo`
takes them back."""

Files = Annotated[list[UploadFile], File(description="Pictures: JPEG, PNG, WebP, BMP, GIF or TIFF.")]
REFUSALS = {
    code: {"model": Problem, "description": text}
    for code, text in {
        401: "No token, or a wrong one.",
        413: "More bytes or pictures than allowed.",
        415: "Not a multipart form.",
        422: "Something is missing or cannot be used.",
        503: "Busy: try again after the seconds in Retry-After.",
    }.items()
}


def make_app(
    host: Host,
    token: str | None = None,
    *,
    max_batch: int = 32,
    waiting: int = 128,
    patience: float = 0.002,
) -> FastAPI:
    """The server of one model. At most `max_batch` pictures go through it at once and `waiting` requests queue.

    >>> app = make_app(Host("birds"), token="secret")  # doctest: +SKIP
    """
    metrics = Metrics(host)
    batcher = Batcher(host, metrics, max_batch, waiting, patience)
    teacher = ThreadPoolExecutor(1, "teaching")
    lessons_waiting = 0

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        batcher.thread.shutdown()
        teacher.shutdown()

    async def change(action: str, lesson: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        nonlocal lessons_waiting
        if lessons_waiting >= LESSONS_WAITING:
            raise HTTPException(503, "too many lessons wait already; try again later", BUSY)
        lessons_waiting += 1
        try:
            event = await asyncio.get_running_loop().run_in_executor(teacher, lesson, *arguments)
        finally:
            lessons_waiting -= 1
        metrics.lessons.labels(action).inc()
        return event

    guarded = [Security(HTTPBearer(auto_error=False, description="The server's token."))] if token else []
    routes = APIRouter(dependencies=guarded, responses=REFUSALS)

    @routes.post("/predict", tags=["recognise"])
    async def predict(files: Files, top: Annotated[int, Query(ge=1, le=1000)] = 5) -> Answers:
        """Name what each picture shows, with a calibrated confidence, or `unknown`.

        A picture that cannot be read has an `error` and does not stop the others.
        """
        decoded = await run_in_threadpool(host.decode, await contents(files, host.limits.pictures))
        found = await batcher.recognise(decoded, top)
        return Answers(answers=[item.entry(file.filename or "") for file, item in zip(files, found)])

    @routes.post("/learn", tags=["teach"])
    async def learn(
        files: Files,
        name: Annotated[str | None, Form(description="The class that all pictures show.")] = None,
        names: Annotated[list[str] | None, Form(description="Instead: the class of each picture, in order.")] = None,
        add: Annotated[bool, Form(description="Add pictures to classes that are known already.")] = False,
    ) -> Change:
        """Teach new classes from a few pictures each. When it answers, the lesson is on disk."""
        if (name is None) == (names is None):
            raise HTTPException(422, "send either name (one for all pictures) or names (one per picture)")
        labels = names if names is not None else [name] * len(files)
        if len(labels) != len(files):
            raise HTTPException(422, f"there are {len(files)} pictures but {len(labels)} names")
        lessons: dict[str, list[bytes]] = {}
        for label, picture in zip(labels, await contents(files, host.limits.pictures)):
            lessons.setdefault(label, []).append(picture)
        return Change(**await change("learn", host.learn_many, lessons, add))

    @routes.post("/forget", tags=["teach"])
    async def forget(name: Annotated[str, Form(description="The class to remove.")]) -> Change:
        """Remove a class. `/undo` brings it back."""
        return Change(**await change("forget", host.forget, name))

    @routes.post("/undo", tags=["teach"])
    async def undo(steps: Annotated[int, Form(ge=1, description="How many changes to take back.")] = 1) -> Undone:
        """Take back the last changes, forgetting included."""
        return Undone(**await change("undo", host.undo, steps))

    @routes.get("/classes", tags=["look"])
    def classes() -> Classes:
        """The classes that are known."""
        return Classes(classes=host.classes)

    @routes.get("/history", tags=["look"])
    def history() -> History:
        """What was taught when, and how the model did after it."""
        return History(history=host.history)

    @routes.get("/metrics", tags=["operate"], response_class=Response)
    def read_metrics() -> Response:
        """Requests, latency, batch sizes, queue, classes, lessons and memory, for Prometheus."""
        return Response(prometheus_text(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app = FastAPI(title="fscil", version=__version__, description=ABOUT, lifespan=lifespan, redoc_url=None)
    app.include_router(routes)

    @app.get("/health", tags=["operate"])
    def health() -> Health:
        """Whether the server answers; needs no token."""
        return Health(status="ok", version=__version__)

    @app.exception_handler(UserError)
    async def explain(request: Request, error: UserError) -> JSONResponse:
        ours = isinstance(error.__cause__, OSError)  # the folder could not be written: not the client's doing
        return JSONResponse({"detail": str(error)}, 500 if ours else 422)

    @app.exception_handler(RequestValidationError)
    async def explain_form(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind and kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
            return JSONResponse({"detail": f"send a multipart form, not {kind}"}, 415)
        said = "; ".join(f"{found['loc'][-1]}: {found['msg']}" for found in error.errors())
        return JSONResponse({"detail": said}, 422)

    app.add_middleware(Door, token=token, request_bytes=host.limits.request_bytes, metrics=metrics)
    return app


async def contents(files: Sequence[UploadFile], most: int) -> list[bytes]:
    if len(files) > most:
        raise HTTPException(413, f"{len(files)} pictures are too many at once; send at most {most}")
    return [await file.read() for file in files]


# ---- running it -----------------------------------------------------------------------------------------------------
def serve(app: FastAPI, listening: socket.socket) -> None:
    """Runs until SIGTERM or Ctrl-C, then answers what has arrived and finishes the lesson that is being written."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    uvicorn.Server(config).run(sockets=[listening])
