"""A page on which a photo gets its classes and attention map, and `POST /predict` for programs.

A client's upload is an image or is refused with one sentence; no name in it is ever opened.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.context import SpawnProcess
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, BinaryIO
from urllib.parse import urlsplit

import psutil
import torch
import uvicorn
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import Histogram
from prometheus_client.multiprocess import mark_process_dead
from starlette.exceptions import HTTPException
from starlette_exporter import PrometheusMiddleware, handle_metrics

from vit.bundle import Bundle, load_bundle
from vit.data.images import read_image
from vit.deploy.serve.answers import Answer, AnswerOptions, Answers, Health, Refusal
from vit.deploy.serve.batches import Batches, Photo
from vit.deploy.serve.uploads import (
    HINT,
    MAX_BYTES,
    Uploads,
    end_slowest,
    receive_photos,
    wait_until_gone,
)
from vit.explanation.explainer import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.methods.auto import AUTO, choose_methods
from vit.explanation.methods.registry import find_methods
from vit.explanation.render.contact_sheet import BADGES
from vit.explanation.render.overlay import MAX_SIDE, blend
from vit.explanation.render.page import encode_picture, name_model, render_page, resize_picture
from vit.explanation.render.scale import palette
from vit.explanation.training_photos import TrainingPhotos
from vit.model.find_file import list_example_photos, list_pretrained
from vit.prediction.conformal import LEVELS
from vit.prediction.decision import describe_decision
from vit.prediction.image_predictor import Predictor
from vit.prediction.neighbours import Similar
from vit.prediction.predictor import Pixels
from vit.prediction.records import Prediction, describe_classes, describe_similar
from vit.runtime.arguments import shorten
from vit.runtime.device import choose_device
from vit.runtime.documents import explain_error
from vit.runtime.threads import MAX_THREADS
from vit.runtime.version import __version__

_TEMPLATE = Path(__file__).with_name("serve.html.jinja")
LOCAL_HOSTS = ("127.0.0.1", "localhost")
# until the model is free
WAITING_SECONDS = 60.0
# after SIGTERM, to answer the requests that are there; Kubernetes kills after 30
_ENDING_SECONDS = 25
# requests that are received or wait for the model, for each worker
_MAX_REQUESTS = 128
# pixels of the shorter side of a map's picture
_MIN_SIDE = 224
# training photos on the page
NUM_SIMILAR = 4
# pixels of a training photo's side
_SIMILAR_SIDE = 224
_NUM_EXAMPLES = 4
# how often the prediction sets should include the right class
_COVERAGE = LEVELS[-1]
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
_RETRY = {"Retry-After": "10"}
_PHOTO = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "properties": {"image": {"type": "array", "items": _PHOTO}}}
# the body of POST /predict in OpenAPI
_BODY = {"content": {"image/*": {"schema": _PHOTO}, "multipart/form-data": {"schema": _FORM}}}
_BATCHES = Histogram(
    "vit_batch_photos", "Photos in a forward pass.", buckets=[2**power for power in range(8)]
)
Json = Mapping[str, Any]


def open_app(
    model: str, *, device: str, num_workers: int, build: Callable[[Bundle], FastAPI]
) -> FastAPI:
    """Open a model and build its application, in one of several processes that share the cores."""
    torch.set_num_threads(max(torch.get_num_threads() // num_workers, 1))
    return build(load_bundle(model, device=choose_device(device)))


def build_app(
    bundle: Bundle,
    *,
    precision: str = "auto",
    method: str = AUTO,
    hosts: Sequence[str] = LOCAL_HOSTS,
    num_similar: int = NUM_SIMILAR,
    batch_size: int = 32,
    max_delay: float = 0,
) -> FastAPI:
    """Build the application.

    Args:
        bundle: The model. If its attention can't be read, answers have no map.
        precision: Precision of predictions, see `vit.evaluate`; maps are computed in float32.
        method: Map method; "auto" is the first one of `vit.explain`.
        hosts: Requests must name one of them, so that no other site can let its name point here.
            "*.example.com" is each name below example.com.
        num_similar: Training photos that the page shows with a photo, if the model file names
            any. 0: no answer names a training photo.
        batch_size, max_delay: See `Batches`. More than 32 photos together are hardly faster.

    Raises:
        ValueError: The method or the precision is unknown, or the model has no classifier.
    """
    service = _Service(bundle, precision=precision, method=method, num_similar=num_similar)
    service.batches = Batches(service.predict_batch, size=batch_size, max_delay=max_delay)

    async def check_host(request: Request) -> None:
        name = request.headers.get("host", "")
        with suppress(ValueError):
            host = urlsplit(f"//{name}").hostname or ""
            if any(fnmatchcase(host, pattern.lower()) for pattern in hosts):
                return
        text = f"this server isn't called {shorten(name)!r}; --allow-host allows it"
        raise HTTPException(400, text)

    # the framework's own pages load scripts from another site
    app = FastAPI(
        title="vit serve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # behind a proxy, the address of a redirect would be wrong
        redirect_slashes=False,
        dependencies=[Depends(check_host)],
        responses={status: {"model": Refusal} for status in (400, 500)},
    )
    app.state.service = service
    app.get("/health")(service.show_health)
    # monitors ask for the head alone
    show = partial(app.api_route, methods=["GET", "HEAD"], include_in_schema=False)
    show("/")(service.show_page)
    show("/metrics")(handle_metrics)
    show("/health")(service.show_health)
    app.post(
        "/predict",
        response_model=Answers,
        response_model_exclude_unset=True,
        responses={status: {"model": Refusal} for status in (403, 408, 413, 415, 422, 503)},
        openapi_extra={"requestBody": _BODY},
    )(service.predict)
    app.exception_handler(HTTPException)(_refuse)
    app.exception_handler(RequestValidationError)(_refuse)
    app.exception_handler(Exception)(_refuse)
    app.add_middleware(PrometheusMiddleware, app_name="vit", prefix="vit")
    return app


class _Service:
    """Answers requests with one model: photos are decoded by several threads, predicted together
    (`predict_batch`), and explained one at a time (`_explain`).
    """

    batches: Batches

    def __init__(self, bundle: Bundle, *, precision: str, method: str, num_similar: int) -> None:
        self.bundle = bundle
        self._predictor = Predictor(bundle, coverage=_COVERAGE, precision=precision)
        self._batch_predictor = self._predictor.batch_predictors[0]
        # an unknown method is an error, a model whose attention can't be read is none
        if method != AUTO:
            find_methods([method])
        self.explainer: Explainer | None = None
        with suppress(ValueError):
            methods = choose_methods((method,), bundle, num_images=1)[:1]
            self.explainer = Explainer(bundle, methods, batch_size=1, sanity_checks=True)
        self.training_photos = TrainingPhotos(bundle, side=_SIMILAR_SIDE)
        self.no_similar = self.training_photos.problem
        if not num_similar:
            self.no_similar = (
                "this server names no training images: it was started with --similar 0"
            )
        context = {
            "model": name_model(bundle.name),
            "class_names": bundle.class_names,
            "examples": self._choose_examples(),
            "max_bytes": MAX_BYTES,
            "has_map": self.explainer is not None,
            "finds_unusual": bundle.likeness is not None,
            "labels": bundle.is_multilabel,
            "decision": describe_decision(bundle),
            "coverage": f"{100 * _COVERAGE:.0f} %",
            "badges": BADGES,
            "ramps": [_describe_ramp(signed=signed) for signed in (False, True)],
            "num_similar": 0 if self.no_similar else num_similar,
        }
        # it is the same for every request
        self.page = render_page(_TEMPLATE, context)
        self._decoders = ThreadPoolExecutor(torch.get_num_threads(), "decode")
        # photos without a map wait for one map at most
        self._map_turn = asyncio.Lock()
        # requests are limited, not connections: one that asks for nothing costs next to nothing
        self._places = asyncio.Semaphore(_MAX_REQUESTS)
        self._uploads: Uploads = set()

    def _choose_examples(self) -> list[dict[str, str]]:
        """Choose photos to try the page with: those of the package for its model, or else training
        photos of the first classes, as far as `TrainingPhotos` shows them."""
        if self.bundle.name in list_pretrained():
            return [
                {
                    "name": path.stem.replace("_", " "),
                    "picture": f"data:image/jpeg;base64,{b64encode(path.read_bytes()).decode()}",
                }
                for path in list_example_photos()
            ]
        if self.no_similar:
            return []
        names, labels = self.bundle.class_names, self.bundle.is_multilabel
        images = self.bundle.metadata["conformal"]["training_images"]
        # the first of each class; an image of several labels has no class of its own
        first: dict[str, str] = {}
        for number, (path, index) in enumerate(sorted(images, key=itemgetter(1)), 1):
            first.setdefault(f"photo {number}" if labels else names[index], path)
        drawn = [
            (name, self.training_photos.draw(Similar(path, name, 1.0)).picture)
            for name, path in islice(first.items(), _NUM_EXAMPLES)
        ]
        return [{"name": name, "picture": picture} for name, picture in drawn if picture]

    def show_page(self) -> HTMLResponse:
        """Answer `GET /`."""
        return HTMLResponse(self.page, headers=_HEADERS)

    def show_health(self) -> Health:
        """Answer `GET /health`."""
        return Health(
            version=__version__,
            model=self.bundle.name,
            sha256=self.bundle.sha256,
            precision=self._batch_predictor.precision,
            classes=list(self.bundle.class_names),
        )

    async def predict(
        self, request: Request, options: Annotated[AnswerOptions, Query()]
    ) -> Answers | Response:
        """Predict the classes of a photo, or of each photo of a form."""
        if options.similar and self.no_similar:
            raise HTTPException(400, self.no_similar)
        if self._places.locked() and not end_slowest(self._uploads):
            raise HTTPException(503, "too many requests at once; try again", _RETRY)
        async with self._places:
            files = await receive_photos(request, self._uploads)
            answers = asyncio.ensure_future(self._answer_all(files, options))
            gone = asyncio.ensure_future(wait_until_gone(request))
            try:
                await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answers.done():
                    # nginx's status for it; nobody reads the answer
                    return Response(status_code=499)
                return answers.result()
            finally:
                answers.cancel()
                gone.cancel()
                for file in files:
                    file.close()

    async def _answer_all(self, files: Sequence[BinaryIO], options: AnswerOptions) -> Answers:
        if len(files) == 1:
            return await self._answer(files[0], options)

        async def answer(file: BinaryIO) -> Answer | Refusal:
            try:
                return await self._answer(file, options)
            except HTTPException as error:
                return Refusal(error=error.detail)

        return list(await asyncio.gather(*map(answer, files)))

    async def _answer(self, file: BinaryIO, options: AnswerOptions) -> Answer:
        labels = self.bundle.is_multilabel
        maps: list[Json] = []
        try:
            async with asyncio.timeout(WAITING_SECONDS):
                photo = await asyncio.wrap_future(self._decoders.submit(self._decode, file))
                prediction = await self.batches.predict((photo, options))
                if options.map != "none":
                    async with self._map_turn:
                        maps = await self.batches.run(partial(self._explain, file, options))
        except TimeoutError:
            raise HTTPException(503, "the model is busy; try again", _RETRY) from None
        present = prediction.labels or []
        classes = [
            each
            for rank, each in enumerate(prediction.classes)
            if rank < options.top_k or each[1] in present
        ]
        facts: dict[str, object] = {
            "classes": describe_classes(classes),
            "note": prediction.note,
            "prediction_set": prediction.prediction_set,
            "p_value": prediction.p_value,
            "precision": prediction.precision,
        }
        if labels:
            facts["labels"] = present
        if options.similar:
            similar = (prediction.similar or [])[: options.similar]
            facts["similar"] = describe_similar(similar)
            if options.pictures:
                draw = self.training_photos.draw
                facts["similar_pictures"] = await self.batches.run(
                    lambda: [draw(image).picture for image in similar]
                )
        facts |= {"maps": maps} if labels else {"map": next(iter(maps), None)}
        return Answer.model_validate(facts)

    def _decode(self, file: BinaryIO) -> Pixels:
        """Return a photo as the model sees it, which takes little memory while it waits."""
        try:
            if not file.seek(0, os.SEEK_END):
                raise HTTPException(400, f"the photo is empty; {HINT}")
            file.seek(0)
            return self.bundle.preprocess.to_uint8(read_image(file, name="the upload"))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    def predict_batch(self, photos: Sequence[Photo]) -> list[Prediction]:
        """Predict the classes of photos of several requests together."""
        _BATCHES.observe(len(photos))
        predictor = self._predictor
        predictor.top_k = max(options.top_k for _, options in photos)
        if self.bundle.is_multilabel:
            predictor.top_k = len(self.bundle.class_names)
        predictor.similar = max(options.similar for _, options in photos)
        if self.bundle.device.type == "cpu":
            # an equal part for each thread
            num_threads = min(torch.get_num_threads(), MAX_THREADS)
            self._batch_predictor.batch_size = math.ceil(len(photos) / num_threads)
        return list(predictor.predict_pixels([("", [pixels]) for pixels, _ in photos]))

    def _explain(self, file: BinaryIO, options: AnswerOptions) -> list[Json]:
        """Return the map of a photo, or one for each label: a picture of it over the photo, or its
        values."""
        if self.explainer is None:
            return []
        # decoded again: large photos that wait would take much memory
        file.seek(0)
        photo = self.bundle.preprocess.to_rgb(read_image(file, name="the upload"))
        (explained,) = self.explainer.explain(items_from_images([photo])).images
        shown = resize_picture(photo, min_side=_MIN_SIDE, max_side=MAX_SIDE)
        maps: list[Json] = []
        for map in explained.maps:
            assert map.scale is not None
            facts: dict[str, object] = {
                "method": map.method.name,
                "title": map.method.title,
                "caption": map.describe(),
                "signed": map.method.signed,
                "sanity_check": map.sanity_check,
            }
            if self.bundle.is_multilabel:
                facts["label"] = map.target_name
            if options.map == "png":
                overlay = blend(shown, map.shown_values, explained.geometry, scale=map.scale)
                facts["png"] = encode_picture(overlay, "PNG")
            else:
                facts["values"] = map.values.tolist()
            maps.append(facts)
        return maps


def _describe_ramp(*, signed: bool) -> str:
    """Return the colours of a map as those of a gradient in CSS; low values are transparent."""
    colours = palette(signed=signed)[[0, 128, 255]].tolist()
    low, middle, high = (f"rgb({red} {green} {blue})" for red, green, blue in colours)
    return f"{low}, transparent, {high}" if signed else f"transparent, {middle}, {high}"


def _refuse(request: Request, error: Exception) -> JSONResponse:
    status, headers = 500, _HEADERS
    message = "the server failed at this request; its log says why"
    if isinstance(error, RequestValidationError):
        status, message = 422, explain_error(error.errors()[0])
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, {**_HEADERS, **(error.headers or {})}
        # the framework's own words don't say what to do
        message = {
            404: "there is /, /predict, /health, /metrics and /openapi.json, nothing else",
            405: f"/predict takes POST, everything else GET; {HINT}",
        }.get(status, error.detail)
    return JSONResponse({"error": message}, status, headers)


def list_addresses(host: str) -> list[str]:
    """List the addresses of this machine at which a server that listens on `host` is reached."""
    if host != "0.0.0.0":
        return [host]
    cards = psutil.net_if_addrs().values()
    return [each.address for card in cards for each in card if each.family == socket.AF_INET]


def run_server(
    app: FastAPI | Callable[[], FastAPI],
    *,
    host: str,
    port: int,
    workers: int = 1,
    on_start: Callable[[str], None] = print,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which let those that are there end.

    Args:
        app: The application, see `build_app`; for several workers a function that can be pickled,
            which each of them calls.
        host, port, workers: See `vit serve`.
        on_start: Called with the addresses at which the server answers.

    Raises:
        OSError: The port can't be used.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise OSError(
            f"{host} port {port} can't be used ({error.strerror}); choose another --port or --host"
        ) from error
    # Connections inherit it. Without it, an answer waits 40 ms until its client has confirmed the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    # clients that vanished in the middle of a request
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    port = listener.getsockname()[1]
    with listener, suppress(KeyboardInterrupt):
        on_start("  ".join(f"http://{name}:{port}" for name in list_addresses(host)))
        if isinstance(app, FastAPI):
            _serve(app, listener)
        else:
            _supervise(app, listener, num_workers=workers)


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what clients are sending, and tell them to go, before connections are closed."""
        for each in self.servers:
            each.close()
        self.server_state.default_headers.append((b"connection", b"close"))
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                while self.server_state.connections:
                    await asyncio.sleep(0.05)
        await super().shutdown(sockets)


def _serve(app: FastAPI, listener: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_ENDING_SECONDS,
    )
    # a line for each request, and none about the server itself
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    _Server(config).run(sockets=[listener])


def _work(app: Callable[[], FastAPI], listener: socket.socket) -> None:
    # a worker left alone would keep the port
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # before the server, which hears no signal while it opens the model
    _serve(app(), listener)


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
    signal.raise_signal(signal.SIGTERM)


def _supervise(app: Callable[[], FastAPI], listener: socket.socket, *, num_workers: int) -> None:
    """Serve with several processes, and replace those that are killed.

    uvicorn's own supervisor waits up to a minute for a worker that was killed while it opened its
    model, and doesn't hear SIGTERM meanwhile.
    """

    def start() -> SpawnProcess:
        process = get_context("spawn").Process(target=_work, args=(app, listener), daemon=True)
        # Ctrl-C reaches each process of a terminal; a worker ends when its parent says so
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        signal.signal(signal.SIGINT, before)
        return process

    is_ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_ending.set())
    with TemporaryDirectory(prefix="vit-serve-") as folder:
        # the library sums what the workers count
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        processes = [start() for _ in range(num_workers)]
        while not is_ending.wait(0.5):
            for place, process in enumerate(processes):
                if process.exitcode is not None and process.exitcode < 0:
                    mark_process_dead(process.pid, folder)  # type: ignore[no-untyped-call]
                    processes[place] = start()
                elif process.exitcode is not None:
                    # another one would end in the same way
                    is_ending.set()
        # refuses others, who would wait for nobody
        listener.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
