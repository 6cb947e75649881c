"""A page on which a photo gets its classes and attention map, and `POST /predict` for programs.

An upload is an image or is refused with one sentence; no name in it is ever opened.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import FastAPI, File, HTTPException, Query, Request, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from starlette.middleware.trustedhost import TrustedHostMiddleware

from vit.bundle import Bundle
from vit.data.images import read_image
from vit.deploy.serve.batches import MAX_BATCH, Batches
from vit.explanation.explain import explain
from vit.explanation.render.page import name_model, render_page
from vit.prediction.batch_predictor import Pixels
from vit.prediction.decision import describe_decision
from vit.prediction.predictor import Predictor
from vit.prediction.records import Prediction
from vit.runtime.version import __version__

_TEMPLATE = Path(__file__).with_name("serve.html.jinja")
LOCAL_HOSTS = ("127.0.0.1", "localhost")
_MAX_BYTES = 20 * 2**20
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
Json = Mapping[str, Any]


def build_app(bundle: Bundle, *, hosts: Sequence[str] = LOCAL_HOSTS) -> FastAPI:
    """Build the application. If the attention of the model can't be read, answers have no map.

    Requests must name one of the hosts, so that no other site can let its name point here.
    "*.example.com" is each name below example.com.
    """
    service = _Service(bundle)
    # the framework's own pages load scripts from another site
    app = FastAPI(title="vit serve", version=__version__, docs_url=None, redoc_url=None)
    app.get("/health")(service.show_health)
    app.get("/", include_in_schema=False)(service.show_page)
    app.post("/predict")(service.predict)
    app.middleware("http")(_guard)
    # the last one sees a request first
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return app


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse an upload before it is received, and say to browsers how answers may be used."""
    headers = request.headers
    length = headers.get("content-length", "")
    response: Response
    if request.method != "POST":
        response = await answer(request)
    # a browser names the site that asks; programs send no such header
    elif headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        response = _refuse(403, "the page of another site may not use this model")
    # in chunks, an upload has no size before its end
    elif not length.isdecimal() or "transfer-encoding" in headers:
        response = _refuse(411, "the upload doesn't say its size; send Content-Length")
    elif int(length) > _MAX_BYTES:
        response = _refuse(413, f"the upload is larger than {_MAX_BYTES // 2**20} MB")
    else:
        response = await answer(request)
    response.headers.update(_HEADERS)
    return response


def _refuse(status: int, text: str) -> Response:
    return JSONResponse({"detail": text}, status)


class _Service:
    """Answers requests with one model. Several photos are decoded at a time, predicted together,
    and explained one after the other."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._predictor = Predictor(bundle, batch_size=MAX_BATCH)
        if bundle.device.type == "cpu":
            self._predictor.batch_size = 8  # the threads share the photos that wait
        if bundle.is_multilabel:
            self._predictor.top_k = len(bundle.class_names)  # each may be there
        self._batches = Batches(self._predict_batch)
        self.has_map = False
        with suppress(ValueError):
            self._explain(Image.new("RGB", (8, 8)))
            self.has_map = True
        context = {
            "model": name_model(bundle.name),
            "class_names": bundle.class_names,
            "max_bytes": _MAX_BYTES,
            "has_map": self.has_map,
            "labels": bundle.is_multilabel,
            "decision": describe_decision(bundle),
        }
        # it is the same for every request
        self._page = render_page(_TEMPLATE, context)

    def show_page(self) -> HTMLResponse:
        """Answer `GET /`."""
        return HTMLResponse(self._page)

    def show_health(self) -> Json:
        """Answer `GET /health`."""
        return {
            "status": "ok",
            "version": __version__,
            "model": self.bundle.name,
            "sha256": self.bundle.sha256,
            "precision": self._predictor.batch_predictor.precision,
            "classes": list(self.bundle.class_names),
        }

    async def predict(
        self,
        image: Annotated[UploadFile, File(description="A photo of at most 20 MB.")],
        map: Annotated[bool, Query(description="Add the map of each predicted class.")] = False,
    ) -> Json:
        """Predict the classes of a photo."""
        # as the model sees it, which takes little memory while it waits
        pixels = await asyncio.to_thread(
            lambda: self.bundle.preprocess.to_uint8(self._open(image.file))
        )
        prediction = await self._batches.predict(pixels)
        # a line of `vit predict`, for a photo without a path
        answer = prediction.to_dict()
        del answer["path"]
        if map and self.has_map:
            # decoded again: large photos that wait would take much memory
            answer["maps"] = await self._batches.run(lambda: self._explain(self._open(image.file)))
        return answer

    def _open(self, file: BinaryIO) -> Image.Image:
        file.seek(0)
        try:
            return self.bundle.preprocess.to_rgb(read_image(file, name="the upload"))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    def _predict_batch(self, photos: Sequence[Pixels]) -> list[Prediction]:
        return list(self._predictor.predict_pixels([("", pixels) for pixels in photos]))

    def _explain(self, photo: Image.Image) -> list[Json]:
        """Return the first map of a photo, or one for each predicted label: a value for each patch,
        and the part of the photo that they cover."""
        (explained,) = explain(self.bundle, [photo], checks=True, batch_size=1).images
        left, top, right, bottom = explained.geometry.box
        width, height = explained.geometry.original_size
        return [
            {
                "method": map.method.name,
                "caption": map.caption,
                "values": map.values.tolist(),
                "box": [left / width, top / height, right / width, bottom / height],
                "check": str(map.sanity_check),
            }
            for map in explained.maps
            if map.method == explained.maps[0].method
        ]
