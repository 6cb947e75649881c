"""`vit serve`: the answers of the command line over HTTP, a sentence for every bad request, a page
that shows them."""

import asyncio
import base64
import hashlib
import io
import logging
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import vit
from tests.browser import NASTY_CLASS, find_low_contrast, find_unnamed, find_wide
from tests.conftest import Launcher, SaveModel
from vit.bundle import Bundle, Likeness, load_bundle
from vit.model.find_file import list_example_photos
from vit.runtime.device import choose_precision

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from fastapi import Request
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from starlette.exceptions import HTTPException

from vit.deploy.serve import app as serve
from vit.deploy.serve import uploads as receiving
from vit.deploy.serve.answers import Answer

# Starlette before 1.8 leaves the files of a form that is cut off to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NAMES = ("ant", "<b>", "cow")
FORM = {"content-type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="image"'
FILE = PART + b'; filename="a"\r\n\r\n'


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def photo() -> bytes:
    random = np.random.default_rng(0)
    return encode(Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Bundle:
    path = save_model(
        tmp_path_factory.mktemp("serve") / "run" / "model.safetensors",
        class_names=NAMES,
    )
    return load_bundle(path)


@pytest.fixture(scope="module")
def client(bundle: Bundle) -> Iterator[TestClient]:
    with TestClient(serve.build_app(bundle), base_url="http://127.0.0.1:8000") as client:
        yield client


def test_a_photo_gets_the_classes_of_predict_and_the_map_of_explain(
    client: TestClient, bundle: Bundle, photo: bytes
) -> None:
    picture = Image.open(io.BytesIO(photo))
    answer = client.post("/predict?map=array&top_k=2", files={"image": photo}).json()
    (expected,) = vit.predict(bundle, picture, top_k=2).predictions
    assert [
        (each["index"], each["name"], each["probability"]) for each in answer["classes"]
    ] == expected.classes
    explanations = vit.explain(bundle, picture)
    # the map of the class comes first
    assert list(explanations.maps) == ["libra-removal", "rollout"]
    maps = explanations.maps["libra-removal"][0]
    np.testing.assert_allclose(answer["map"]["values"], maps, rtol=1e-5, atol=1e-7)
    assert answer["map"]["method"] == "libra-removal"
    (check,) = explanations.checks["libra-removal"][0]
    assert answer["map"]["sanity_check"]["verdict"] == check.verdict

    answer = client.post("/predict?map=png", files={"image": photo}).json()
    assert answer["map"]["png"].startswith("data:image/png;base64,")
    assert len(answer["classes"]) == 3
    # programs that don't ask for a map wait for none
    assert client.post("/predict", files={"image": photo}).json()["map"] is None

    # 19 held-out images that are nearly the one training image, unlike the photo
    features = vit.embed(bundle, Image.new("RGB", (60, 40), "red"))
    likeness = Likeness(np.asarray(features), np.full(19, 1e-6, np.float32))
    known = replace(bundle, likeness=likeness)
    strict = TestClient(serve.build_app(known), base_url="http://127.0.0.1")
    notes = [
        each.post("/predict?map=none", files={"image": photo}).json()["note"]
        for each in (client, strict)
    ]
    assert notes == ["", "unusual"]
    assert vit.predict(known, picture).predictions[0].note == "unusual"


@pytest.mark.parametrize("thresholds", [{}, {"ant": 0.0, "cow": 0.01}, dict.fromkeys(NAMES, 1.0)])
def test_a_photo_gets_its_labels_and_the_map_of_each(
    bundle: Bundle, photo: bytes, thresholds: dict[str, float]
) -> None:
    point = {"rule": "f1", "thresholds": thresholds, "num_images": 9}
    metadata = bundle.metadata | ({"operating_point": point} if thresholds else {})
    labels = replace(bundle, data={**bundle.data, "task": "multilabel"}, metadata=metadata)
    client = TestClient(serve.build_app(labels), base_url="http://127.0.0.1")
    answer = client.post("/predict?map=array&top_k=1", files={"image": photo}).json()
    (expected,) = vit.predict(labels, Image.open(io.BytesIO(photo)), top_k=3).predictions
    assert answer["labels"] == expected.labels
    # the most probable, and all that are predicted
    kept = [
        row for row in expected.classes if row[1] in {expected.classes[0][1], *answer["labels"]}
    ]
    assert [
        (each["index"], each["name"], each["probability"]) for each in answer["classes"]
    ] == kept
    explained = vit.explain(labels, Image.open(io.BytesIO(photo))).images[0].maps
    explained = [each for each in explained if each.method.name == "libra-removal"]
    assert [each["label"] for each in answer["maps"]] == [each.target_name for each in explained]
    assert [each["label"] for each in answer["maps"]] == (answer["labels"] or [kept[0][1]])
    for found, each in zip(answer["maps"], explained, strict=True):
        np.testing.assert_allclose(found["values"], each.values, rtol=1e-5, atol=1e-7)
        assert found["caption"] == each.describe()
    assert "map" not in answer
    unexplained = client.post("/predict?map=none", files={"image": photo}).json()
    assert unexplained["maps"] == []
    page = client.get("/").text
    assert "finds any of 3 labels" in page
    assert ("Operating point f1: predicts " in page) == bool(thresholds)
    assert not re.findall(
        r">[^<]*class[^<]*<", page.partition("<script>")[0].partition("<body>")[2]
    )


def test_the_page_names_the_classes_and_has_the_example_photos_of_the_package(
    client: TestClient,
) -> None:
    assert "<p>ant, &lt;b&gt;, cow</p>" in client.get("/").text
    assert 'id="examples"' not in client.get("/").text
    packaged = TestClient(serve.build_app(load_bundle("imagenette")), base_url="http://127.0.0.1")
    page = packaged.get("/").text
    pictures = re.findall(r'<button type="button"><img src="data:image/jpeg;base64,([^"]+)', page)
    photos = list_example_photos()
    assert [base64.b64decode(picture) for picture in pictures] == [
        path.read_bytes() for path in photos
    ]
    assert "garbage truck, gas pump, golf ball, parachute" in page


def test_the_nearest_training_photos_are_those_of_predict(
    named_bundle: Bundle, bundle: Bundle, photo: bytes
) -> None:
    picture = Image.open(io.BytesIO(photo))
    client = TestClient(serve.build_app(named_bundle), base_url="http://127.0.0.1")
    answer = client.post("/predict?map=none&similar=3", files={"image": photo}).json()
    (expected,) = vit.predict(named_bundle, picture, similar=3, batch_size=1).predictions
    assert expected.similar is not None
    assert answer["similar"] == [
        {"path": row.path, "class": row.class_name, "similarity": row.similarity}
        for row in expected.similar
    ]
    # pictures are for those who ask, and programs don't by default
    assert "similar_pictures" not in answer
    address = "/predict?map=none&similar=3&pictures=true"
    pictures = client.post(address, files={"image": photo}).json()["similar_pictures"]
    assert [text[:23] for text in pictures] == ["data:image/jpeg;base64,"] * 3
    assert "similar" not in client.post("/predict?map=none", files={"image": photo}).json()
    response = client.post("/predict?similar=21", files={"image": photo})
    assert response.status_code == 422
    assert "similar: input should be less than or equal to 20" in response.json()["error"]

    # a model file without them, and a server that tells nobody
    plain = TestClient(serve.build_app(bundle), base_url="http://127.0.0.1")
    with pytest.raises(ValueError, match="names no training images") as error:
        vit.predict(bundle, picture, similar=1)
    closed = TestClient(serve.build_app(named_bundle, num_similar=0), base_url="http://127.0.0.1")
    for refusing, reason in ((plain, str(error.value)), (closed, "started with --similar 0")):
        response = refusing.post("/predict?similar=1", files={"image": photo})
        assert response.status_code == 400
        assert reason in response.json()["error"]
        assert refusing.post("/predict?map=none", files={"image": photo}).status_code == 200
        assert "Nearest training photos" not in refusing.get("/").text
        assert 'id="examples"' not in refusing.get("/").text
    # an example of each class, as far as the model file names and knows it
    assert client.get("/").text.count('<button type="button"><img src="data:image/jpeg') == 2
    assert "Nearest training photos" in client.get("/").text


def test_upright_pixels_count_and_no_name_of_a_file_is_opened(
    client: TestClient, tmp_path: Path, photo: bytes
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned, file = Image.open(io.BytesIO(photo)).transpose(Image.Transpose.ROTATE_90), io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    secret = tmp_path / "secret.png"
    secret.write_bytes(photo)
    expected = client.post("/predict?map=none", files={"image": photo}).json()
    assert (
        client.post("/predict?map=none", files={"image": (str(secret), file.getvalue())}).json()
        == expected
    )
    for content in (str(secret).encode(), b"file://" + str(secret).encode()):
        assert client.post("/predict", files={"image": (str(secret), content)}).status_code == 422


def chunks(count: int) -> Iterator[bytes]:
    yield FILE
    for _ in range(count):
        yield bytes(2**20)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no form": ({"json": {"path": "/etc/passwd"}}, 415, "send photos as a form"),
    "no body": ({}, 415, "send photos as a form"),
    "plain form": ({"data": {"image": "photo.jpg"}}, 415, "send photos as a form"),
    "no file": ({"content": PART + b"\r\n\r\nb\r\n--x--", "headers": FORM}, 400, "no file"),
    "no boundary": (
        {"content": b"abc", "headers": {"content-type": "multipart/form-data"}},
        400,
        "damaged",
    ),
    "no parts": ({"content": b"abc", "headers": FORM}, 400, "damaged"),
    "no end": ({"content": FILE + b"b", "headers": FORM}, 400, "no file"),
    "101 files": ({"files": [("image", b"a")] * 101}, 400, "more than 100 photos"),
    "empty body": ({"headers": {"content-type": "image/jpeg"}}, 400, "the photo is empty"),
    "empty": ({"files": {"image": ("a.jpg", b"")}}, 400, "the photo is empty"),
    "text": (
        {"files": {"image": b"hello"}},
        422,
        "can't be read as an image: it is not one of AVIF, BMP",
    ),
    "PostScript": (
        {"files": {"image": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"}},
        422,
        "not one of AVIF",
    ),
    "too large": ({"files": {"image": bytes(serve.MAX_BYTES)}}, 413, "larger than 20 MB"),
    "too large, in pieces": ({"content": chunks(21), "headers": FORM}, 413, "larger than 20 MB"),
    "too large, without a form": (
        {"content": chunks(21), "headers": {"content-type": "image/jpeg"}},
        413,
        "larger than 20 MB",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_upload_is_refused_with_one_sentence(client: TestClient, case: str) -> None:
    request, status, sentence = REFUSED[case]
    response = client.post("/predict", **request)
    assert response.status_code == status
    assert sentence in response.json()["error"]
    assert "Traceback" not in response.text
    assert "\n" not in response.text


def test_broken_images_and_too_many_pixels_are_refused(client: TestClient, photo: bytes) -> None:
    bomb = encode(Image.new("1", (20_000, 20_000)))
    for content, sentence in ((photo[:2000], "truncated"), (bomb, "more than 100,000,000 pixels")):
        response = client.post("/predict", files={"image": content})
        assert response.status_code == 422
        assert sentence in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "sentence"),
    [
        ("GET", "/predict", 405, "/predict takes POST"),
        ("POST", "/", 405, "everything else GET"),
        ("GET", "/model.safetensors", 404, "nothing else"),
        ("GET", "/docs", 404, "nothing else"),
        ("GET", "/health/", 404, "nothing else"),
        ("POST", "/predict?map=mp4", 422, "map: input should be 'png', 'array' or 'none'"),
        ("POST", "/predict?top_k=0", 422, "top_k: input should be greater than or equal to 1"),
    ],
)
def test_other_requests_are_refused(
    client: TestClient, method: str, path: str, status: int, sentence: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert sentence in response.json()["error"]


def test_other_names_and_other_sites_are_refused(
    bundle: Bundle, client: TestClient, photo: bytes
) -> None:
    for name in ("evil.example", "evil.example:8000", "", "localhost.evil.example"):
        response = client.get("/", headers={"host": name})
        assert (response.status_code, "--allow-host" in response.json()["error"]) == (400, True)
    assert client.get("/", headers={"host": "localhost:9000"}).status_code == 200
    upload = {"image": photo}
    response = client.post("/predict", files=upload, headers={"sec-fetch-site": "cross-site"})
    assert (response.status_code, "another site" in response.json()["error"]) == (403, True)
    answer = client.post(
        "/predict?map=none", files=upload, headers={"origin": "http://evil.example"}
    )
    assert not [name for name in answer.headers if name.startswith("access-control")]
    named = TestClient(
        serve.build_app(bundle, hosts=["photos.example"]), base_url="http://photos.example"
    )
    page = named.get("/")
    assert page.status_code == 200
    # a proxy may put the page below a path: its addresses are relative
    addresses = re.findall(r"""(?:src|href|action|fetch\()\s*=?\s*["'`]([^"'`]*)""", page.text)
    assert any(address.startswith("predict?") for address in addresses)
    assert not [address for address in addresses if address.startswith("/")]


@pytest.mark.parametrize(
    ("chunk", "pause", "is_refused"),
    [(0, 0.1, True), (1000, 0.05, True), (10_000, 0.01, False), (40_000, 0.5, True)],
)
def test_an_upload_that_is_too_slow_is_given_up(
    monkeypatch: pytest.MonkeyPatch, chunk: int, pause: float, is_refused: bool
) -> None:
    """100 kB in all: nothing comes, too little comes, it comes quickly, and in more than a minute."""
    seconds = 0.3 if chunk < 20_000 else 2
    monkeypatch.setattr(receiving, "_SLOW_SECONDS", seconds)
    monkeypatch.setattr(receiving, "_MIN_RATE", 2**16 / seconds)
    monkeypatch.setattr(receiving, "RECEIVING_SECONDS", 0.8)
    sent = [FILE] + [b"x" * chunk] * (100_000 // max(chunk, 1000)) + [b"\r\n--x--\r\n"]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": sent.pop(0), "more_body": bool(sent)}

    headers = [(name.encode(), value.encode()) for name, value in FORM.items()]
    request = Request({"type": "http", "headers": headers}, receive)
    uploads: receiving.Uploads = set()
    if not is_refused:
        (photo,) = asyncio.run(receiving.receive_photos(request, uploads))
        assert len(photo.read()) == 100_000
        photo.close()
    else:
        with pytest.raises(HTTPException, match="arrived too slowly") as error:
            asyncio.run(receiving.receive_photos(request, uploads))
        assert error.value.status_code == 408
    assert not uploads


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def read_metrics(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def count(metrics: str, name: str, **labels: str) -> float:
    """The sum of what Prometheus reads under a name."""
    families = text_string_to_metric_families(metrics)
    samples = [sample for family in families for sample in family.samples]
    return sum(
        each.value
        for each in samples
        if each.name == name and labels.items() <= each.labels.items()
    )


def count_running(port: int) -> float:
    return count(read_metrics(port), "vit_requests_in_progress", method="POST")


class HeldModel:
    """The model, which computes nothing before `leave` is set.

    Attributes:
        entered: Set once it has the first photos.
        batches: Shapes of the photos that it was given, batch by batch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.batches: list[list[tuple[int, ...]]] = []
        predict = serve.Predictor.predict_pixels

        def wait(predictor: Any, batch: Any) -> Any:
            self.batches.append([pixels.shape for _, (pixels,) in batch])
            self.entered.set()
            assert self.leave.wait(30)
            return predict(predictor, batch)

        monkeypatch.setattr(serve.Predictor, "predict_pixels", wait)


def test_a_long_wait_for_the_model_is_given_up(
    bundle: Bundle, photo: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HeldModel(monkeypatch)
    with TestClient(serve.build_app(bundle), base_url="http://127.0.0.1") as client:
        ask = partial(client.post, "/predict", files={"image": photo})
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask)
            assert model.entered.wait(30)
            monkeypatch.setattr(serve, "WAITING_SECONDS", 0.2)
            busy = ask()
            decoding = threading.Event()
            with monkeypatch.context() as patch:
                patch.setattr(serve, "read_image", lambda *_, **__: decoding.wait(30))
                undecoded = ask()
            decoding.set()
            model.leave.set()
            assert first.result().status_code == 200
    assert (undecoded.status_code, undecoded.json()) == (503, busy.json())
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "10")
    assert "busy" in busy.json()["error"]
    # what was given up is never computed
    assert len(model.batches) == 1


def test_requests_share_a_batch_and_have_the_answers_of_predict(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    sizes = [(40, 60), (700, 500), (8, 300), (16, 16), (1, 1), (900, 31)]
    modes = ["RGB", "L", "RGBA", "CMYK", "P", "1"]
    photos = [
        Image.fromarray(random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)) for size in sizes
    ]
    photos = [image.convert(mode) for image, mode in zip(photos, modes, strict=True)]
    photos[1] = Image.fromarray(random.integers(0, 65_536, (500, 700), dtype=np.uint16))
    contents = [encode(image, "TIFF") for image in photos]
    broken = encode(photos[0])[:2000]
    model = HeldModel(monkeypatch)
    app = serve.build_app(bundle, precision="float32")
    with TestClient(app, base_url="http://127.0.0.1") as client, ThreadPoolExecutor(16) as pool:

        def ask(number: int, content: bytes) -> Any:
            address = f"/predict?top_k={1 + number % 3}"
            if number % 2:
                return client.post(address, content=content, headers={"content-type": "image/tiff"})
            fields = {"user": "somebody"}
            return client.post(address, files={"image": content}, data=fields)

        before = client.get("/metrics").text
        first = pool.submit(ask, 0, contents[0])
        assert model.entered.wait(30)
        asked = [pool.submit(ask, *pair) for pair in enumerate([*contents, broken])]
        files = [("image", content) for content in (contents[1], broken, b"", contents[2])]
        several = pool.submit(client.post, "/predict", files=files)
        waiting = app.state.service.batches._waiting
        wait_until(lambda: len(waiting) == 8)
        model.leave.set()
        answers = [each.result() for each in [*asked, several, first]]

    # what waits has the size of the model's input, however large the photo is
    shape = (*bundle.preprocess.image_size, 3)
    assert model.batches == [[shape], [shape] * 8]
    predictions = vit.predict(bundle, photos, precision="float32").predictions
    expected = [{row[1]: row[2] for row in each.classes} for each in predictions]

    def compare(answer: Any, number: int, count: int) -> None:
        found = {each["name"]: each["probability"] for each in answer["classes"]}
        assert len(found) == count
        assert found == pytest.approx({name: expected[number][name] for name in found}, abs=1e-5)
        assert list(found) == list(expected[number])[:count]
        assert answer["precision"] == "float32"
        assert Answer.model_validate(answer).model_dump(exclude_unset=True) == answer

    for number, answer in enumerate(answers[:6]):
        compare(answer.json(), number, 1 + number % 3)
    # one that can't be read spoils no other
    assert (answers[6].status_code, "truncated" in answers[6].json()["error"]) == (422, True)
    found = several.result().json()
    compare(found[0], 1, 3)
    assert [list(each) for each in found[1:3]] == [["error"]] * 2
    assert "truncated" in found[1]["error"]
    assert "empty" in found[2]["error"]
    compare(found[3], 2, 3)
    after = client.get("/metrics").text
    for expected_count, name, labels in (
        (9, "vit_batch_photos_sum", {}),
        (2, "vit_batch_photos_count", {}),
        (8, "vit_requests_total", {"path": "/predict", "status_code": "200"}),
        (1, "vit_requests_total", {"path": "/predict", "status_code": "422"}),
    ):
        assert count(after, name, **labels) - count(before, name, **labels) == expected_count


@pytest.mark.parametrize(
    ("size", "delay", "bounds"), [(4, 60, (0, 30)), (32, 0.5, (0.5, 30)), (32, 0, (0, 0.4))]
)
def test_photos_wait_for_others_until_a_batch_is_full_or_the_delay_is_over(
    bundle: Bundle, photo: bytes, size: int, delay: float, bounds: tuple[float, float]
) -> None:
    num_requests = 4 if delay else 1
    app = serve.build_app(bundle, batch_size=size, max_delay=delay)
    with TestClient(app, base_url="http://127.0.0.1") as client, ThreadPoolExecutor(4) as pool:
        before = client.get("/metrics").text
        start = time.monotonic()
        asked = [
            pool.submit(client.post, "/predict", files={"image": photo})
            for _ in range(num_requests)
        ]
        assert [each.result().status_code for each in asked] == [200] * num_requests
        seconds = time.monotonic() - start
        after = client.get("/metrics").text
    assert total(after) - total(before) == num_requests
    counts = [count(text, "vit_batch_photos_count") for text in (before, after)]
    assert counts[1] - counts[0] == 1
    assert bounds[0] <= seconds < bounds[1]


def test_a_client_that_goes_away_frees_its_place_and_an_ending_server_answers(
    bundle: Bundle, photo: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MAX_REQUESTS", 2)
    model = HeldModel(monkeypatch)
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(photo) + photo

    def ask() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        connection.sendall(request)
        return connection

    with serve_in_thread(bundle) as (port, _), ask() as first:
        assert model.entered.wait(30)
        ask().close()
        # nobody reads its answer, and the log has no line for it
        wait_until(lambda: count(read_metrics(port), "vit_requests_total", status_code="499") == 1)
        with ask() as third:
            wait_until(lambda: count_running(port) == 2)
            SERVERS[-1].should_exit = True
            model.leave.set()
            assert [each.recv(12) for each in (first, third)] == [b"HTTP/1.1 200"] * 2
    assert [len(batch) for batch in model.batches] == [1, 1]


def test_health_metrics_and_the_schema(bundle: Bundle, client: TestClient, photo: bytes) -> None:
    health = client.get("/health").json()
    assert health == {
        "status": "ok",
        "version": vit.__version__,
        "model": bundle.name,
        "sha256": bundle.sha256,
        "precision": choose_precision("auto", bundle.device),
        "classes": list(NAMES),
    }
    assert health["sha256"] == hashlib.sha256(Path(bundle.name).read_bytes()).hexdigest()
    assert {client.head(path).status_code for path in ("/", "/health", "/metrics")} == {200}
    # addresses that a stranger makes up take no memory
    client.get("/nothing")
    assert "nothing" not in client.get("/metrics").text

    schema = client.get("/openapi.json").json()
    assert list(schema["paths"]) == ["/health", "/predict"]
    predict = schema["paths"]["/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {"image/*", "multipart/form-data"}
    refused = {status for status in predict["responses"] if status != "200"}
    assert refused == {"400", "403", "408", "413", "415", "422", "500", "503"}
    for status in refused:
        content = predict["responses"][status]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith("/Refusal")
    for options in ("map=png", "map=array&top_k=1"):
        answer = client.post(f"/predict?{options}", files={"image": photo}).json()
        assert Answer.model_validate(answer).model_dump(exclude_unset=True) == answer
        assert set(answer) <= set(schema["components"]["schemas"]["Answer"]["properties"])
        assert set(answer["map"]) <= set(schema["components"]["schemas"]["Map"]["properties"])


def test_a_failure_of_the_server_is_json(
    bundle: Bundle, photo: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(serve.Predictor, "predict_pixels", fail)
    app = serve.build_app(bundle)
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    response = client.post("/predict", files={"image": photo})
    assert (response.status_code, list(response.json())) == (500, ["error"])
    assert count(client.get("/metrics").text, "vit_requests_total", status_code="500") >= 1


def test_a_model_without_attention_has_a_map_of_another_method(photo: bytes) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    size = vit.bundle.Preprocess((16, 16))
    plain = Bundle.from_model(model, class_names=["a", "b", "c", "d"], preprocess=size)
    client = TestClient(serve.build_app(plain), base_url="http://127.0.0.1")
    answer = client.post("/predict?map=png", files={"image": photo}).json()
    assert (len(answer["classes"]), answer["map"]["method"]) == (4, "input-x-gradient")
    with pytest.raises(ValueError, match="unknown method"):
        serve.build_app(plain, method="nonsense")
    with pytest.raises(ValueError, match="precision"):
        serve.build_app(plain, precision="nonsense")


# --- the command and the page
# ------------------------------------------------------------------------------


@contextmanager
def serving(cli: Launcher, *arguments: object) -> Iterator[str]:
    """The address of a server of its own, which Ctrl-C must end without a word."""
    process = cli.start("serve", *arguments, "--port", 0, "--device", "cpu")
    try:
        assert process.stderr is not None
        # on a busy machine a line says before it how long the model takes to open
        lines = (re.match(r"http://127\.0\.0\.1:\d+", line) for line in process.stderr)
        yield next(address[0] for address in lines if address)
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    assert (process.returncode, rest) == (0, "")


def test_mistakes_of_the_command_are_one_line(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = cli.fail("serve", tiny_run, "--port", taken.getsockname()[1])
    assert "can't be used" in line
    assert "does not exist" in cli.fail("serve", tmp_path / "none")
    assert "unknown method" in cli.fail("serve", tiny_run, "--method", "x")


@pytest.mark.extended
def test_workers_share_a_port_and_what_they_count_and_end_with_their_server(
    cli: Launcher, tiny_run: Path, photo: bytes
) -> None:
    process = cli.start("serve", tiny_run, "--port", 0, "--device", "cpu", "--workers", 2)
    assert process.stderr is not None
    address = next(line for line in process.stderr if line.startswith("http")).split()[0]
    port = int(address.rpartition(":")[2])
    request = partial(post, port, photo)
    with ThreadPoolExecutor(32) as pool:
        statuses = list(pool.map(request, range(200)))
        assert statuses == [200] * 200
        assert total(read_metrics(port)) == 200
        workers = psutil.Process(process.pid).children()
        workers = [each for each in workers if "spawn_main" in " ".join(each.cmdline())]
        assert len(workers) == 2

        # one is killed and replaced; the other answers meanwhile, and nothing counted is lost
        workers[0].kill()
        wait_until(lambda: not workers[0].is_running() or workers[0].status() == "zombie")
        assert list(pool.map(request, range(20))) == [200] * 20
        assert total(read_metrics(port)) == 220
        assert count_running(port) == 0

    # the workers of a server that is killed free the port
    process.kill()
    wait_until(lambda: post(port, photo, 0) is None)
    process.communicate(timeout=60)


@pytest.mark.extended
@pytest.mark.parametrize("workers", [1, 2])
def test_an_ending_server_answers_what_its_clients_have_sent(
    cli: Launcher, tiny_run: Path, photo: bytes, workers: int
) -> None:
    process = cli.start("serve", tiny_run, "--port", 0, "--device", "cpu", "--workers", workers)
    assert process.stderr is not None
    address = next(line for line in process.stderr if line.startswith("http")).split()[0]
    port = int(address.rpartition(":")[2])

    def ask(_: int) -> bool:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        is_open = False
        try:
            while True:
                is_open = connection.sock is not None
                # connects again after an answer that closed the connection
                connection.request("POST", "/predict", photo, {"Content-Type": "image/png"})
                with connection.getresponse() as answer:
                    assert answer.status == 200
                    answer.read()
        except OSError:
            return is_open

    with ThreadPoolExecutor(32) as pool:
        asked = pool.map(ask, range(32))
        wait_until(lambda: total(read_metrics(port)) > 50, seconds=60)
        process.send_signal(signal.SIGTERM)
        # none was closed while a request was on it
        assert not any(asked)
    assert (process.wait(60), process.stderr.read()) == (0, "")


@pytest.mark.extended
def test_memory_is_bounded_while_large_photos_wait(cli: Launcher, tiny_run: Path) -> None:
    random = np.random.default_rng(2)
    pixels = random.integers(0, 256, (60, 80, 3), dtype=np.uint8).repeat(50, 0).repeat(50, 1)
    large = encode(Image.fromarray(pixels), "JPEG")
    with serving(cli, tiny_run) as address:
        port = int(address.rpartition(":")[2])
        with ThreadPoolExecutor(60) as pool:
            assert set(pool.map(partial(post, port, large), range(60))) == {200}
            peak = count(read_metrics(port), "process_resident_memory_bytes")
            assert set(pool.map(partial(post, port, large), range(120))) == {200}
            after = count(read_metrics(port), "process_resident_memory_bytes")
    # 12 megapixels are 36 MB: sixty of them would be 2.2 GB
    assert peak < 1.5e9
    assert after < peak + 1e8


def post(port: int, content: bytes, _: int) -> int | None:
    """The status of an answer; None if the port is closed."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict", content, {"Content-Type": "image/jpeg"}
    )
    try:
        with urlopen(request, timeout=60) as answer:
            status: int = answer.status
            return status
    except URLError as error:
        return getattr(error, "code", None)


def total(metrics: str) -> float:
    """Photos that went through the model."""
    return count(metrics, "vit_batch_photos_sum")


@pytest.mark.extended
@pytest.mark.browser
def test_the_page_takes_photos_by_keyboard_and_by_drop(
    cli: Launcher, tiny_run: Path, tmp_path: Path, photo: bytes, browser: Any
) -> None:
    (tmp_path / "a.png").write_bytes(photo)
    (tmp_path / "broken.png").write_bytes(photo[:2000])
    with serving(cli, tiny_run) as address:
        browser.get(address)
        field = browser.find_element("id", "file")
        browser.switch_to.active_element.send_keys("\ue004")  # Tab: the theme, then the file
        browser.switch_to.active_element.send_keys("\ue004")
        assert browser.switch_to.active_element == field

        field.send_keys(str(tmp_path / "a.png"))
        wait_for(browser, "return !document.getElementById('result').hidden")
        (expected,) = vit.predict(tiny_run, tmp_path / "a.png").predictions
        rows = [row.text for row in browser.find_elements("css selector", "#classes tbody tr")]
        assert [row.split()[0] for row in rows] == [name for _, name, _ in expected.classes]
        assert rows[0].endswith(f"{100 * expected.classes[0][2]:.1f} %")
        wait_for(
            browser,
            "return ['photo', 'map'].every((id) => document.getElementById(id).naturalWidth > 0)",
        )
        assert "evidence for" in browser.find_element("id", "about").text
        assert "map " in browser.find_element("id", "verdict").text
        assert browser.find_element("id", "answer").text.startswith(expected.classes[0][1])

        field.send_keys(str(tmp_path / "broken.png"))
        wait_for(browser, "return document.getElementById('status').className === 'warn'")
        assert "truncated" in browser.find_element("id", "status").text
        assert not browser.find_element("id", "result").is_displayed()

        browser.execute_script(DROP)
        wait_for(browser, "return !document.getElementById('result').hidden")
        for width, height in ((1400, 900), (390, 844)):
            screen = {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 500,
            }
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            widths = browser.execute_script(
                "return [document.documentElement.scrollWidth, innerWidth]"
            )
            browser.save_screenshot(str(tmp_path / f"{width}.png"))
            # a screen of this width, on which nothing is wider; a scroll bar may take some of it
            assert widths[0] <= width == widths[1]
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        log = [entry for entry in browser.get_log("browser") if "422" not in entry["message"]]
    assert log == []


@pytest.mark.browser
@pytest.mark.parametrize("labels", [False, True])
def test_the_page_shows_the_nearest_training_photos_and_runs_no_name(
    named_bundle: Bundle, browser: Any, labels: bool
) -> None:
    root = Path(named_bundle.config["data"]["root"])
    conformal = named_bundle.metadata["conformal"]
    name, _ = conformal["training_images"][-1]
    if labels:
        images = [(path, -1) for path, _ in conformal["training_images"]]
        metadata = {
            **named_bundle.metadata,
            "conformal": {**conformal, "training_images": images},
            "operating_point": {
                "rule": NASTY_CLASS,
                "thresholds": dict.fromkeys(named_bundle.class_names, 0.0),
                "num_images": 9,
            },
        }
        data = {**named_bundle.data, "task": "multilabel"}
        named_bundle = replace(named_bundle, data=data, metadata=metadata)
    with serve_in_thread(named_bundle) as (port, _):
        browser.get(f"http://127.0.0.1:{port}")
        browser.find_element("id", "file").send_keys(str(root / name))
        wait_for(browser, "return !document.getElementById('result').hidden")
        drawn = (
            "return [...document.querySelectorAll('.neighbours img')].every(i => i.naturalWidth)"
        )
        wait_for(browser, drawn)
        items = browser.find_elements("css selector", ".neighbours li")
        assert len(items) == serve.NUM_SIMILAR
        assert [span.text for span in items[0].find_elements("tag name", "span")] == [
            "1.00" if labels else f"{NASTY_CLASS}, 1.00",
            name.rpartition("/")[2],
        ]
        buttons = browser.find_elements("css selector", "#maps button")
        assert len(buttons) == (len(named_bundle.class_names) if labels else 0)
        if labels:
            answer = browser.find_element("id", "answer").text
            assert answer.startswith(f"{buttons[0].text} ")
            assert all(f", {button.text} " in answer for button in buttons[1:])
            assert [button.get_attribute("aria-pressed") for button in buttons[:2]] == [
                "true",
                "false",
            ]
            first = browser.find_element("id", "map").get_attribute("src")
            second = buttons[1].text
            buttons[1].click()
            assert browser.find_element("id", "map").get_attribute("src") != first
            assert f"evidence for {second}" in browser.find_element("id", "about").text
        image = items[0].find_element("tag name", "img")
        assert image.get_attribute("alt") == f"training photo {name}"
        browser.find_element("css selector", "#examples button").send_keys("\ue007")  # Enter
        wait_for(browser, "return !document.getElementById('result').hidden")
        assert find_unnamed(browser) == []
        assert find_low_contrast(browser) == []
        assert browser.get_log("browser") == []
        for width in (1400, 390):
            screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            assert find_wide(browser) == []
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


DROP = """
const canvas = document.createElement('canvas');
canvas.width = 90; canvas.height = 60;
canvas.getContext('2d').fillRect(20, 20, 30, 30);
canvas.toBlob((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], '<img src=x onerror=alert(1)>.png', {type: 'image/png'}));
  const event = new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true});
  document.getElementById('drop').dispatchEvent(event);
});
"""


def wait_for(browser: Any, script: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not browser.execute_script(script):
        assert time.monotonic() < end, f"{script}: {browser.find_element('id', 'status').text}"
        time.sleep(0.05)


def test_too_many_requests_get_json_and_health_is_answered_beside_them(
    bundle: Bundle, photo: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MAX_REQUESTS", 0)
    with TestClient(serve.build_app(bundle), base_url="http://127.0.0.1:8000") as client:
        response = client.post("/predict", files={"image": photo})
        assert (response.status_code, response.headers["retry-after"]) == (503, "10")
        assert response.json() == {"error": "too many requests at once; try again"}
        assert client.get("/health").json()["status"] == "ok"


# those of `serve_in_thread`
SERVERS: list[Any] = []


@contextmanager
def serve_in_thread(bundle: Bundle) -> Iterator[tuple[int, list[str]]]:
    """The port of a server, and the lines of its log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = threading.Event()
    make = serve._Server

    def remember(config: Any) -> Any:
        logging.getLogger("uvicorn.access").addHandler(handler)
        SERVERS.append(make(config))
        return SERVERS[-1]

    app = serve.build_app(bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_Server", remember)
        options = {"host": "127.0.0.1", "port": port, "on_start": lambda _: started.set()}
        thread = threading.Thread(target=partial(serve.run_server, app, **options))
        thread.start()
        started.wait(10)
        try:
            yield port, lines
        finally:
            SERVERS[-1].should_exit = True
            thread.join(20)
            logging.getLogger("uvicorn.access").removeHandler(handler)


def test_idle_connections_take_no_place_and_each_request_is_a_line(bundle: Bundle) -> None:
    with serve_in_thread(bundle) as (port, lines):
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        for connection in idle:
            connection.close()
    assert sum("/health" in line for line in lines) == 1


def test_the_body_of_an_answer_does_not_wait_for_the_client(bundle: Bundle) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    seconds = []
    with (
        serve_in_thread(bundle) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
    ):
        for _ in range(20):
            start = time.perf_counter()
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            seconds.append(time.perf_counter() - start)
    # a client confirms after 40 ms
    assert min(seconds[10:]) < 0.03


def test_slow_uploads_lose_their_places_to_others(
    bundle: Bundle, photo: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MAX_REQUESTS", 8)
    monkeypatch.setattr(receiving, "_PROTECTED_SECONDS", 0.1)
    head = b"POST /predict?map=none HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n"
    head += b"Content-Type: multipart/form-data; boundary=x\r\nConnection: close\r\n\r\n"
    body = FILE + photo + b"\r\n--x--\r\n"
    with serve_in_thread(bundle) as (port, _):
        slow = []
        for _ in range(8):
            slow.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            slow[-1].sendall(head % 10_000 + FILE)
        time.sleep(0.3)
        # one that has sent more is not the one that goes
        slow[0].sendall(b"x" * 5000)
        for number in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(head % len(body) + body)
                assert connection.recv(100).startswith(b"HTTP/1.1 200"), number
        slow[0].sendall(b"x" * (5000 - len(FILE)))
        assert slow[0].recv(1)
        answers = []
        for connection in slow:
            connection.settimeout(0.05)
            try:
                answers.append(connection.recv(12))
            except TimeoutError:
                answers.append(b"")
            connection.close()
    # the first is complete, and no photo
    assert answers[0] == b"TTP/1.1 400 "
    # a place is free after the first
    assert answers.count(b"HTTP/1.1 408") == 1


def test_every_address_of_this_machine_is_allowed_and_named() -> None:
    assert serve.list_addresses("127.0.0.1") == ["127.0.0.1"]
    addresses = serve.list_addresses("0.0.0.0")
    assert addresses[0] == "127.0.0.1"
    assert all(re.fullmatch(r"[\d.]+", address) for address in addresses)
