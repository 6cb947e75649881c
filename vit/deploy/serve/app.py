"""A page on which a photo gets its classes and attention map, and `POST /predict` for programs.

A client's upload is an image or is refused with one sentence; no name in it is ever opened.
"""

import asyncio
import logging
import math
import socket
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from vit.bundle import Bundle, require_classifier
from vit.data.images import read_image
from vit.explanation.best_method import AUTO, choose_methods, replace_best
from vit.explanation.explainer import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.methods.registry import find_methods
from vit.explanation.render.contact_sheet import BADGES
from vit.explanation.render.overlay import MAX_SIDE, blend
from vit.explanation.render.page import encode_picture, name_model, render_page, resize_picture
from vit.explanation.render.scale import palette
from vit.explanation.training_photos import TrainingPhotos
from vit.model.find_file import list_example_photos, list_pretrained
from vit.prediction.conformal import LEVELS
from vit.prediction.decision import describe_decision
from vit.prediction.neighbours import Similar
from vit.prediction.predict import predict_images
from vit.prediction.records import describe_classes, describe_similar
from vit.runtime.documents import explain_error

_TEMPLATE = Path(__file__).with_name("serve.html.jinja")
LOCAL_HOSTS = ("127.0.0.1", "localhost")
MAX_BYTES = 20 * 2**20
# to receive a photo
RECEIVING_SECONDS = 60.0
# within which this many more bytes of a photo, or its end, must arrive
_SILENCE_SECONDS = 5.0
_MIN_BYTES = 64 * 2**10
# after which an upload may lose its place to another request
_PROTECTED_SECONDS = 1.0
# until the model is free
WAITING_SECONDS = 60.0
# requests that are received or wait for the model
_MAX_REQUESTS = 64
# pixels of the shorter side of a map's picture
_MIN_SIDE = 224
# training photos on the page, and at most for programs
NUM_SIMILAR = 4
_MAX_SIMILAR = 20
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
_HINT = "send one photo as a form: curl -F image=@photo.jpg http://…/predict"
_RETRY = {"Retry-After": "10"}
Json = Mapping[str, Any]


class AnswerOptions(BaseModel):
    """Parameters of the address that a program may set.

    Attributes:
        map: The attention map over the photo, its values, or none.
        top_k: Number of classes; labels that are predicted are always among them.
        similar: Number of training images most similar to the photo.
        pictures: Add their pictures, where they can be read.
    """

    map: Literal["png", "array", "none"] = "png"
    top_k: int = Field(5, ge=1)
    similar: int = Field(0, ge=0, le=_MAX_SIMILAR)
    pictures: bool = False


def build_app(
    bundle: Bundle,
    *,
    method: str = AUTO,
    hosts: Sequence[str] = LOCAL_HOSTS,
    num_similar: int = NUM_SIMILAR,
) -> FastAPI:
    """Build the application.

    Args:
        bundle: The model. If its attention can't be read, answers have no map.
        method: Map method; "best" is the one that `vit faithfulness` found, and "auto" the first
            one of `vit.explain`.
        hosts: Requests must name one of them, so that no other site can let its name point here.
        num_similar: Training photos that the page shows with a photo, if the model file names
            any. 0: no answer names a training photo.

    Raises:
        ValueError: The method is unknown, or the model has no classifier.
    """
    require_classifier(bundle)
    service = _Service(bundle, method=method, num_similar=num_similar)
    # the framework's own pages load scripts from another site
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    app.get("/")(service.show_page)
    app.get("/health")(service.show_health)
    app.post("/predict")(service.predict)
    app.exception_handler(HTTPException)(_refuse)
    app.exception_handler(RequestValidationError)(_refuse_options)
    return app


class _Service:
    """Answers requests with one model, a photo at a time.

    `predict` takes a request and waits for the model, `_answer` is its answer.
    """

    def __init__(self, bundle: Bundle, *, method: str, num_similar: int) -> None:
        self.bundle = bundle
        # an unknown method is an error, a model whose attention can't be read is none
        if method != AUTO:
            find_methods(replace_best((method,), bundle))
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
        self.model_is_free = asyncio.Lock()
        # requests are limited, not connections: one that asks for nothing costs next to nothing
        self.places = asyncio.Semaphore(_MAX_REQUESTS)
        self.uploads: set[Upload] = set()

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
        images = self.bundle.metadata["conformal"]["training_images"]
        if self.bundle.is_multilabel:
            # an image has no class of its own
            named = [(f"photo {n}", path) for n, (path, _) in enumerate(images[:_NUM_EXAMPLES], 1)]
        else:
            # the first image of each class
            paths = {class_index: path for path, class_index in reversed(images)}
            names = self.bundle.class_names
            named = [(names[index], paths[index]) for index in sorted(paths)[:_NUM_EXAMPLES]]
        examples = []
        for name, path in named:
            picture = self.training_photos.draw(Similar(path, name, 1.0)).picture
            if picture is not None:
                examples.append({"name": name, "picture": picture})
        return examples

    def show_page(self) -> HTMLResponse:
        """Answer `GET /`."""
        return HTMLResponse(self.page, headers=_HEADERS)

    def show_health(self) -> Json:
        """Answer `GET /health`."""
        return {"status": "ok", "model": self.bundle.name}

    async def predict(self, request: Request, options: Annotated[AnswerOptions, Query()]) -> Json:
        """Answer `POST /predict`."""
        if options.similar and self.no_similar:
            raise HTTPException(400, self.no_similar)
        if self.places.locked() and not self._end_slowest_upload():
            raise HTTPException(503, "too many requests at once; try again", _RETRY)
        async with self.places:
            upload = await receive_photo(request, self.uploads)
            try:
                await self._wait_for_model()
                try:
                    return await run_in_threadpool(self._answer, upload, options)
                finally:
                    self.model_is_free.release()
            finally:
                await upload.close()

    def _end_slowest_upload(self) -> bool:
        """End the slowest upload, which frees its place; return false if none is old enough."""
        candidates = [upload for upload in self.uploads if upload.age > _PROTECTED_SECONDS]
        if not candidates:
            return False
        slowest = min(candidates, key=lambda upload: upload.num_bytes / upload.age)
        self.uploads.discard(slowest)
        slowest.end()
        return True

    async def _wait_for_model(self) -> None:
        try:
            async with asyncio.timeout(WAITING_SECONDS):
                await self.model_is_free.acquire()
        except TimeoutError:
            raise HTTPException(503, "the model is busy; try again", _RETRY) from None

    def _answer(self, upload: UploadFile, options: AnswerOptions) -> Json:
        try:
            photo = self.bundle.preprocess.to_rgb(read_image(upload.file, name="the upload"))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        labels = self.bundle.is_multilabel
        (prediction,) = predict_images(
            self.bundle,
            photo,
            top_k=len(self.bundle.class_names) if labels else options.top_k,
            coverage=_COVERAGE,
            batch_size=1,
            similar=options.similar,
        )
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
        }
        if labels:
            facts["labels"] = present
        if prediction.similar is not None:
            facts["similar"] = describe_similar(prediction.similar)
            if options.pictures:
                facts["similar_pictures"] = [
                    self.training_photos.draw(image).picture for image in prediction.similar
                ]
        maps: list[Json] = []
        if self.explainer is not None and options.map != "none":
            maps = _explain(self.explainer, photo, as_picture=options.map == "png")
        if labels:
            facts["maps"] = maps
        else:
            facts["map"] = maps[0] if maps else None
        return facts


class Upload:
    """A photo that is being received. Its `limit` raises TimeoutError if bytes come too slowly, after a
    minute, or when its place is needed.

    Attributes:
        num_bytes: Bytes that have arrived.
        limit: Context in which the photo is received.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_expected = 0.0
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self.limit = asyncio.timeout_at(self._start + _SILENCE_SECONDS)

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return self._loop.time() - self._start

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived."""
        self.num_bytes += num_bytes
        if self.num_bytes >= self._num_expected:
            self._num_expected = self.num_bytes + _MIN_BYTES
            end = self._loop.time() + _SILENCE_SECONDS
            self.limit.reschedule(min(end, self._start + RECEIVING_SECONDS))

    def end(self) -> None:
        """End it now, whatever arrives."""
        self._num_expected = math.inf
        self.limit.reschedule(self._start)


async def receive_photo(request: Request, uploads: set[Upload]) -> UploadFile:
    """Receive the photo of a form; its name is never used.

    Args:
        request: The request.
        uploads: Photos that are being received; this one is among them meanwhile.

    Raises:
        HTTPException: The request has no photo, more than one, or is over a limit.
    """
    # a browser names the site that asks; programs send no such header
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HTTPException(403, "the page of another site may not use this model")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, _HINT)
    # before anything is received
    if int(request.headers.get("content-length", 0)) > MAX_BYTES:
        raise _refuse_size()

    upload = Upload()
    chunks = _read_chunks(request, upload)
    parser = MultiPartParser(request.headers, chunks, max_files=1, max_fields=1)
    try:
        async with upload.limit:
            uploads.add(upload)
            try:
                form = await parser.parse()
            finally:
                uploads.discard(upload)
    except TimeoutError:
        text = f"the photo arrived too slowly; it must arrive within {RECEIVING_SECONDS:.0f} s, and"
        rate = _MIN_BYTES / _SILENCE_SECONDS / 2**10
        raise HTTPException(408, f"{text} at {rate:.0f} KB/s or more") from None
    except (MultiPartException, ClientDisconnect) as error:
        raise HTTPException(
            400, f"the form is damaged or holds more than a photo; {_HINT}"
        ) from error

    photos = [value for value in form.values() if isinstance(value, UploadFile)]
    if photos and photos[0].size:
        return photos[0]
    await form.close()
    problem = "the photo is empty" if photos else "the form has no file"
    raise HTTPException(400, f"{problem}; {_HINT}")


async def _read_chunks(request: Request, upload: Upload) -> AsyncGenerator[bytes, None]:
    async for chunk in request.stream():
        upload.add(len(chunk))
        # a request in chunks doesn't say its size, and one that does may lie
        if upload.num_bytes > MAX_BYTES:
            raise _refuse_size()
        yield chunk


def _refuse_size() -> HTTPException:
    return HTTPException(413, f"the upload is larger than {MAX_BYTES / 2**20:.0f} MB")


def _explain(explainer: Explainer, photo: Image.Image, *, as_picture: bool) -> list[Json]:
    """Return the map of a photo, or one of each label: a picture of it over the photo, or its
    values."""
    (explained,) = explainer.explain(items_from_images([photo])).images
    shown = resize_picture(photo, min_side=_MIN_SIDE, max_side=MAX_SIDE)
    maps: list[Json] = []
    for map in explained.maps:
        assert map.scale is not None
        facts: dict[str, object] = {
            "method": map.method.name,
            "title": map.method.title,
            "caption": map.describe(),
            "signed": map.method.signed,
            "sanity_check": map.sanity_check and asdict(map.sanity_check),
        }
        if explainer.bundle.is_multilabel:
            facts["label"] = map.target_name
        if as_picture:
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


def _refuse(request: Request, error: HTTPException) -> JSONResponse:
    message = error.detail
    # the framework's own words don't say what to do
    if error.status_code == 404:
        message = "there is /, /predict and /health, nothing else"
    elif error.status_code == 405:
        message = f"/predict takes POST, / takes GET; {_HINT}"
    headers = {**_HEADERS, **(error.headers or {})}
    return JSONResponse({"error": message}, error.status_code, headers)


def _refuse_options(request: Request, error: RequestValidationError) -> JSONResponse:
    return JSONResponse({"error": explain_error(error.errors()[0])}, 422, _HEADERS)


def list_addresses(host: str) -> list[str]:
    """List the addresses of this machine at which a server that listens on `host` is reached."""
    if host != "0.0.0.0":
        return [host]
    addresses = ["127.0.0.1"]
    # connecting a UDP socket sends nothing; without a network there is no route
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))
        addresses.append(route.getsockname()[0])
    with suppress(OSError):
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys(addresses))


def run_server(
    app: FastAPI, *, host: str, port: int, on_start: Callable[[str], None] = print
) -> None:
    """Answer requests until Ctrl-C.

    Args:
        app: The application, see `build_app`.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
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
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    # a line for each request, and none about the server itself
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    port = listener.getsockname()[1]
    with listener, suppress(KeyboardInterrupt):
        on_start("  ".join(f"http://{name}:{port}" for name in list_addresses(host)))
        uvicorn.Server(config).run(sockets=[listener])
