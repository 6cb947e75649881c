"""A page on which a photo gets its classes and attention map, and `POST /predict`: `vit predict`
and `vit explain` over HTTP. What a client sends is an image or is refused with one sentence;
nothing that it names is ever opened."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from vit.bundle import Bundle
from vit.data.images import read_image
from vit.explanation.best_method import replace_best
from vit.explanation.explainer import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.methods.registry import find_methods
from vit.explanation.render.overlay import MAX_SIDE, blend
from vit.explanation.render.page import encode_picture, name_model, render_page, resize_picture
from vit.explanation.training_photos import TrainingPhotos
from vit.options import ExplainOptions
from vit.prediction.predict import predict_images
from vit.prediction.records import describe_classes, describe_similar
from vit.runtime.documents import explain_error

_TEMPLATE = Path(__file__).with_name("serve.html.jinja")
LOCAL_HOSTS = ("127.0.0.1", "localhost")
MAX_BYTES = 20 * 2**20  # of a request
UPLOAD_SECONDS = 60.0  # to receive a photo
WAITING_SECONDS = 60.0  # until the model is free
_MAX_REQUESTS = 64  # that are received or wait for the model
_MIN_SIDE = 224  # of the picture of a map
NUM_SIMILAR = 4  # training photos on the page
_MAX_SIMILAR = 20  # for programs
_SIMILAR_SIDE = 160
_HINT = "send one photo as a form: curl -F image=@photo.jpg http://…/predict"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
MapForm = Literal["png", "array", "none"]
Json = Mapping[str, Any]


class _AnswerOptions(BaseModel):
    """What a program may ask for, as parameters of the address."""

    # of the attention map
    map: MapForm = "png"
    # classes
    top_k: int = Field(5, ge=1)
    # training images that are most like the photo
    similar: int = Field(0, ge=0, le=_MAX_SIMILAR)
    # whether they come with their pictures, where these can be read
    pictures: bool = False


def build_app(
    bundle: Bundle,
    *,
    method: str = "rollout",
    hosts: Sequence[str] = LOCAL_HOSTS,
    num_similar: int = NUM_SIMILAR,
) -> FastAPI:
    """The application.

    Args:
        bundle: The model. Where its attention can't be read, answers have no map.
        method: Of the map; "best" is the one that `vit faithfulness` found.
        hosts: Requests must name one of them, so that no other site can have its name point here.
        num_similar: Training photos that the page shows beside a photo, where the model file names
            any; 0: nobody is told of the training photos.

    Raises:
        ValueError: for an unknown method.
    """
    options = ExplainOptions(
        methods=replace_best((method,), bundle), batch_size=1, sanity_checks=True
    )
    find_methods(options.methods)  # an unknown one is an error
    explainer: Explainer | None = None
    with suppress(ValueError):  # of a model whose attention can't be read
        explainer = Explainer(bundle, options)
    training_photos = TrainingPhotos(bundle, side=_SIMILAR_SIDE)
    no_similar = training_photos.problem
    if not num_similar:
        no_similar = "this server names no training images: it was started with --similar 0"
    page = render_page(
        _TEMPLATE,
        {
            "model": name_model(bundle.name),
            "count": len(bundle.class_names),
            "max_bytes": MAX_BYTES,
            "has_map": explainer is not None,
            "num_similar": 0 if no_similar else num_similar,
        },
    )
    model_is_free = asyncio.Lock()
    # by counting them: an open connection that asks for nothing costs next to nothing
    places = asyncio.Semaphore(_MAX_REQUESTS)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    def answer(upload: UploadFile, options: _AnswerOptions) -> Json:
        try:
            photo = read_image(upload.file, name="the upload")
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        (prediction,) = predict_images(
            bundle, photo, top_k=options.top_k, batch_size=1, similar=options.similar
        )
        facts: dict[str, object] = {
            "classes": describe_classes(prediction.classes),
            "prediction_set": prediction.prediction_set,
            "p_value": prediction.p_value,
        }
        if prediction.similar is not None:
            facts["similar"] = describe_similar(prediction.similar)
            if options.pictures:
                facts["similar_pictures"] = [
                    training_photos.draw(image).picture for image in prediction.similar
                ]
        if explainer is None or options.map == "none":
            return {**facts, "map": None}
        return {**facts, "map": _explain(explainer, photo, options.map)}

    @app.get("/")
    def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=_HEADERS)

    @app.get("/health")
    def show_health() -> Json:
        return {"status": "ok", "model": bundle.name}

    @app.post("/predict")
    async def predict(request: Request, options: Annotated[_AnswerOptions, Query()]) -> Json:
        if options.similar and no_similar:
            raise HTTPException(400, no_similar)
        if places.locked():
            raise HTTPException(503, "too many requests at once; try again", {"Retry-After": "10"})
        async with places:
            return await answer_request(request, options)

    async def answer_request(request: Request, options: _AnswerOptions) -> Json:
        upload = await _receive(request)
        try:
            async with asyncio.timeout(WAITING_SECONDS):
                await model_is_free.acquire()
            try:
                return await run_in_threadpool(answer, upload, options)
            finally:
                model_is_free.release()
        except TimeoutError:
            raise HTTPException(
                503, "the model is busy; try again", {"Retry-After": "10"}
            ) from None
        finally:
            await upload.close()

    @app.exception_handler(AnyHTTPException)
    def refuse(request: Request, error: AnyHTTPException) -> JSONResponse:
        message = error.detail
        if error.status_code == 404:
            message = "there is /, /predict and /health, nothing else"
        elif error.status_code == 405:
            message = f"/predict takes POST, / takes GET; {_HINT}"
        headers = {**_HEADERS, **(error.headers or {})}
        return JSONResponse({"error": message}, error.status_code, headers)

    @app.exception_handler(RequestValidationError)
    def refuse_options(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": explain_error(error.errors()[0])}, 422, _HEADERS)

    return app


async def _receive(request: Request) -> UploadFile:
    """The photo of a form, received within the limits of size and time; its name is never used."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HTTPException(403, "the page of another site may not use this model")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, _HINT)
    too_large = HTTPException(413, f"the upload is larger than {MAX_BYTES / 2**20:.0f} MB")
    if int(request.headers.get("content-length", 0)) > MAX_BYTES:
        raise too_large

    async def read_chunks() -> AsyncGenerator[bytes, None]:
        # a request in chunks doesn't say its size, and one that does may lie
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BYTES:
                raise too_large
            yield chunk

    parser = MultiPartParser(request.headers, read_chunks(), max_files=1, max_fields=1)
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            form = await parser.parse()
    except TimeoutError:
        raise HTTPException(
            408, f"the photo took more than {UPLOAD_SECONDS:.0f} s to arrive"
        ) from None
    except (MultiPartException, ClientDisconnect) as error:
        raise HTTPException(
            400, f"the form is damaged or holds more than a photo; {_HINT}"
        ) from error

    uploads = [value for value in form.values() if isinstance(value, UploadFile)]
    if uploads and uploads[0].size:
        return uploads[0]
    await form.close()
    problem = "the photo is empty" if uploads else "the form has no file"
    raise HTTPException(400, f"{problem}; {_HINT}")


def _explain(explainer: Explainer, photo: Image.Image, form: MapForm) -> Json:
    """The map of a photo: its values, or a picture of it over the photo."""
    (explained,) = explainer.explain(items_from_images([photo])).images
    (map,) = explained.maps
    assert map.scale is not None
    facts = {
        "method": map.method.name,
        "title": map.method.title,
        "sanity_check": map.sanity_check and asdict(map.sanity_check),
    }
    if form == "array":
        return {**facts, "values": map.values.tolist()}
    shown = resize_picture(photo, min_side=_MIN_SIDE, max_side=MAX_SIDE)
    overlay = blend(shown, map.shown_values, explained.geometry, scale=map.scale)
    return {**facts, "png": encode_picture(overlay, "PNG")}


def list_addresses(host: str) -> list[str]:
    """The addresses of this machine at which a server that listens on `host` is reached."""
    if host != "0.0.0.0":
        return [host]
    addresses = ["127.0.0.1"]
    # a UDP socket sends nothing to be connected; without a network there is no route
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
        app: From `build_app`.
        host, port: To listen on; port 0 is a free one.
        on_start: Called with the addresses at which it answers.

    Raises:
        OSError: where the port can't be used.
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
