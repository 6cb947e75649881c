"""A page on which a photo gets its classes and attention map, and `POST /predict` for programs.

An upload is an image or is refused with one sentence; no name in it is ever opened.
"""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import FastAPI, File, HTTPException, Query, Request, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette_exporter import PrometheusMiddleware, handle_metrics

from vit.bundle import Bundle
from vit.data.images import read_image
from vit.deploy.serve.batches import MAX_BATCH, Batches
from vit.explanation.explain import explain
from vit.explanation.render.page import name_model, render_page
from vit.model.find_file import list_example_photos, list_pretrained
from vit.prediction.decision import describe_decision
from vit.prediction.image_predictor import Predictor
from vit.prediction.predictor import Pixels
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


def build_app(
    bundle: Bundle, *, precision: str = "auto", hosts: Sequence[str] = LOCAL_HOSTS
) -> FastAPI:
    """Build the application.

    Args:
        bundle: The model. If its attention can't be read, answers have no map.
        precision: Precision of predictions, see `vit.evaluate`; maps are computed in float32.
        hosts: Requests must name one of them, so that no other site can let its name point here.
            "*.example.com" is each name below example.com.

    Raises:
        ValueError: The precision is unknown, or the model has no classifier.
    """
    service = _Service(bundle, precision=precision)
    # the framework's own pages load scripts from another site
    app = FastAPI(title="vit serve", version=__version__, docs_url=None, redoc_url=None)
    app.get("/health")(service.show_health)
    # monitors ask for the head alone
    app.head("/health", include_in_schema=False)(service.show_health)
    app.get("/", include_in_schema=False)(service.show_page)
    app.post("/predict")(service.predict)
    app.add_route("/metrics", handle_metrics)
    app.add_middleware(PrometheusMiddleware, app_name="vit", prefix="vit")
    app.middleware("http")(_guard)
    # the last one sees a request first
    app.add_middleware(
        TrustedHostMiddleware, allowed_hosts=list(dict.fromkeys(hosts)), www_redirect=False
    )
    return app


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse an upload before it is received, and say to browsers how answers may be used."""
    problem = _find_problem(request) if request.method == "POST" else None
    if problem is None:
        response = await answer(request)
    else:
        status, text = problem
        response = JSONResponse({"detail": text}, status)
    response.headers.update(_HEADERS)
    return response


def _find_problem(request: Request) -> tuple[int, str] | None:
    """Return the status and the reason why an upload is refused, if it is."""
    # a browser names the site that asks; programs send no such header
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return 403, "the page of another site may not use this model"
    length = request.headers.get("content-length", "")
    # in chunks, an upload has no size before its end
    if not length.isdecimal() or "transfer-encoding" in request.headers:
        return 411, "the upload doesn't say its size; send Content-Length"
    if int(length) > _MAX_BYTES:
        return 413, f"the upload is larger than {_MAX_BYTES // 2**20} MB"
    return None


class _Service:
    """Answers requests with one model.

    Several photos are decoded at a time, predicted together, and explained one after the other.
    """

    def __init__(self, bundle: Bundle, *, precision: str) -> None:
        self.bundle = bundle
        batch_size = MAX_BATCH
        # on a CPU, the threads share the photos that wait
        if bundle.device.type == "cpu":
            batch_size = 8
        self._predictor = Predictor(
            bundle,
            top_k=len(bundle.class_names) or 1,
            precision=precision,
            batch_size=batch_size,
        )
        self._batches = Batches(self._predict_batch)
        # a model whose attention can't be read has no maps
        self.has_map = False
        with suppress(ValueError):
            self._explain(Image.new("RGB", (8, 8)))
            self.has_map = True
        examples = list_example_photos() if bundle.name in list_pretrained() else []
        context = {
            "model": name_model(bundle.name),
            "class_names": bundle.class_names,
            "examples": [
                (path.stem.replace("_", " "), b64encode(path.read_bytes()).decode())
                for path in examples
            ],
            "max_bytes": _MAX_BYTES,
            "has_map": self.has_map,
            "labels": bundle.is_multilabel,
            "decision": describe_decision(bundle),
        }
        # it is the same for every request
        self.page = render_page(_TEMPLATE, context)

    def show_page(self) -> HTMLResponse:
        """Answer `GET /`."""
        return HTMLResponse(self.page)

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
        top_k: Annotated[int, Query(ge=1, description="Number of classes.")] = 5,
        map: Annotated[bool, Query(description="Add the map of each predicted class.")] = False,
    ) -> Json:
        """Predict the classes of a photo."""
        pixels = await asyncio.to_thread(self._decode, image.file)
        prediction = await self._batches.predict(pixels)
        labels = prediction.labels
        classes = [
            row
            for rank, row in enumerate(prediction.classes)
            if rank < top_k or row[1] in (labels or ())
        ]
        # a line of `vit predict`, for a photo without a path
        answer = replace(prediction, classes=classes).to_dict()
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

    def _decode(self, file: BinaryIO) -> Pixels:
        """Return a photo as the model sees it, which takes little memory while it waits."""
        return self.bundle.preprocess.to_uint8(self._open(file))

    def _predict_batch(self, photos: Sequence[Pixels]) -> list[Prediction]:
        return list(self._predictor.predict_pixels([("", pixels) for pixels in photos]))

    def _explain(self, photo: Image.Image) -> list[Json]:
        """Return the first map of a photo, or one for each label that is predicted.

        A map has a value for each patch, and the part of the photo that they cover.
        """
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
