"""A page on which a photo gets its classes and attention map, and `POST /predict`: `vit predict` and `vit attention`
over HTTP. What a client sends is an image or is refused with one sentence; nothing that it names is ever opened."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from vit.bundle import Bundle
from vit.data.images import read_image
from vit.evaluation.prediction import predict_images
from vit.explanation.explain import explain_items, fit_settings
from vit.explanation.faithfulness.best_method import replace_best
from vit.explanation.items import items_from_images
from vit.explanation.render.explained import Settings
from vit.explanation.render.overlay import MAX_SIDE, blend
from vit.pages.page import encode_picture, name_model, render_page
from vit.runtime.documents import explain_error

LOCAL_HOSTS = ("127.0.0.1", "localhost")
MOST_BYTES = 20 * 2**20  # of a request
UPLOAD_SECONDS, WAITING_SECONDS = 60.0, 60.0  # to receive a photo; until the model is free
_MOST_CONNECTIONS = 64
_HOW = "send one photo as a form: curl -F image=@photo.jpg http://…/predict"
_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}
MapForm = Literal["png", "array", "none"]


def build_app(bundle: Bundle, *, method: str = "rollout", hosts: Sequence[str] = LOCAL_HOSTS) -> FastAPI:
    """The application; it answers requests that name one of `hosts`, so that no other site can have its name point
    here. Without a map where attention of the model can't be read. Raises ValueError for an unknown method."""
    answer, free = _Answer(bundle, method), asyncio.Lock()
    facts: dict[str, Any] = {"model": name_model(bundle.name), "count": len(bundle.class_names)}
    facts |= {"most_bytes": MOST_BYTES, "has_map": answer.settings is not None}
    page = render_page("serve.html.jinja", facts)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    @app.get("/")
    def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=_HEADERS)

    @app.post("/predict")
    async def predict(request: Request, map: MapForm = "png", top_k: Annotated[int, Query(ge=1)] = 5) -> dict[str, Any]:
        upload = await _receive(request)
        try:
            async with asyncio.timeout(WAITING_SECONDS):
                await free.acquire()
            try:
                return await run_in_threadpool(answer, upload, map, top_k)
            finally:
                free.release()
        except TimeoutError:
            raise HTTPException(503, "the model is busy; try again", {"Retry-After": "10"}) from None
        finally:
            await upload.close()

    @app.exception_handler(AnyHTTPException)
    def refuse(request: Request, error: AnyHTTPException) -> JSONResponse:
        known = {404: "there is / and /predict, nothing else", 405: f"/predict takes POST, / takes GET; {_HOW}"}
        text = known.get(error.status_code, error.detail)
        return JSONResponse({"error": text}, error.status_code, {**_HEADERS, **(error.headers or {})})

    @app.exception_handler(RequestValidationError)
    def refuse_options(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": explain_error(error.errors()[0])}, 422, _HEADERS)

    return app


async def _receive(request: Request) -> UploadFile:
    """The photo of a form, received within the limits of size and time; its name is never used."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HTTPException(403, "the page of another site may not use this model")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, _HOW)
    too_large = HTTPException(413, f"the upload is larger than {MOST_BYTES / 2**20:.0f} MB")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise too_large

    async def receive() -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MOST_BYTES:
                raise too_large
            yield chunk

    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            form = await MultiPartParser(request.headers, receive(), max_files=1, max_fields=1).parse()
    except TimeoutError:
        raise HTTPException(408, f"the photo took more than {UPLOAD_SECONDS:.0f} s to arrive") from None
    except (MultiPartException, ClientDisconnect) as error:
        raise HTTPException(400, f"the form is damaged or holds more than a photo; {_HOW}") from error
    uploads = [value for value in form.values() if isinstance(value, UploadFile)]
    if not uploads or not uploads[0].size:
        await form.close()
        raise HTTPException(400, f"the photo is empty; {_HOW}" if uploads else f"the form has no file; {_HOW}")
    return uploads[0]


class _Answer:
    """From an upload to what the client is told."""

    def __init__(self, bundle: Bundle, method: str) -> None:
        self.bundle = bundle
        settings = Settings(methods=replace_best((method,), bundle), batch_size=1)
        self.settings: Settings | None = None
        with suppress(ValueError):
            self.settings = fit_settings(bundle, settings)

    def __call__(self, upload: UploadFile, form: MapForm, top_k: int) -> dict[str, Any]:
        try:
            photo = read_image(upload.file, name="the upload")
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        (prediction,) = predict_images(self.bundle, photo, top_k=top_k, batch_size=1)
        names = ("index", "name", "probability")
        classes = [dict(zip(names, of_class, strict=True)) for of_class in prediction.classes]
        return {"classes": classes, "map": self._explain(photo, form) if self.settings and form != "none" else None}

    def _explain(self, photo: Image.Image, form: MapForm) -> dict[str, Any]:
        assert self.settings is not None
        (explained,) = explain_items(self.bundle, items_from_images(photo), self.settings).images
        (found,) = explained.maps
        assert found.scale is not None
        check = None if found.sanity_check is None else found.sanity_check.to_dict()
        facts = {"method": found.method.name, "title": found.method.title, "sanity_check": check}
        if form == "array":
            return {**facts, "values": found.values.tolist()}
        scaling = min(max(max(photo.size), 224), MAX_SIDE) / max(photo.size)
        shown = photo.resize([max(round(side * scaling), 1) for side in photo.size], Image.Resampling.LANCZOS)
        overlay = blend(shown, found.values, explained.geometry, scale=found.scale)
        return {**facts, "png": encode_picture(overlay, "PNG")}


def run_server(app: FastAPI, *, host: str, port: int, on_start: Any = print) -> None:
    """Answer requests until Ctrl-C; `on_start` is told the address. Raises OSError where the port can't be used."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        cure = "choose another --port or --host"
        raise OSError(f"{host} port {port} can't be used ({error.strerror}); {cure}") from error
    limits: dict[str, Any] = {"limit_concurrency": _MOST_CONNECTIONS, "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, **limits))
    with listening, suppress(KeyboardInterrupt):
        on_start(f"http://{host}:{listening.getsockname()[1]}")
        server.run(sockets=[listening])
