"""`vit serve`: the answers of `vit predict` and `vit explain` over HTTP, a refusal of every hostile
request, and a page that shows them."""

import io
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.browser import NASTY_CLASS, find_low_contrast, find_unnamed, find_wide, phone
from tests.conftest import Launcher, SaveModel
from vit.bundle import Bundle, load_bundle

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import uvicorn
from fastapi.testclient import TestClient

from vit.deploy.serve import app as serve

# Starlette before 1.8 leaves the files of a form that is cut off to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NAMES = ("ant", NASTY_CLASS, "cow")
FORM = {"content-type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'


def encode(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def draw_photo(seed: int = 0) -> bytes:
    random = np.random.default_rng(seed)
    return encode(Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)))


@pytest.fixture(scope="module")
def photo() -> bytes:
    return draw_photo()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Bundle:
    path = tmp_path_factory.mktemp("serve") / "run" / "model.safetensors"
    return load_bundle(save_model(path, class_names=NAMES))


def open_client(bundle: Bundle) -> TestClient:
    return TestClient(serve.build_app(bundle), base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def client(bundle: Bundle) -> TestClient:
    return open_client(bundle)


def list_classes(answer: dict[str, Any]) -> list[tuple[int, str, float]]:
    return [(row["index"], row["name"], row["probability"]) for row in answer["predictions"]]


def test_a_photo_gets_the_classes_of_predict_and_the_map_of_explain(
    client: TestClient, bundle: Bundle, photo: bytes
) -> None:
    picture = Image.open(io.BytesIO(photo))
    answer = client.post("/predict?map=true", files={"image": photo}).json()
    (expected,) = vit.predict(bundle, picture).predictions
    assert list_classes(answer) == expected.classes
    explained = vit.explain(bundle, picture, methods="libra-removal").images[0]
    (shown,) = answer["maps"]
    assert shown["method"] == "libra-removal"
    np.testing.assert_allclose(shown["values"], explained.maps[0].values, rtol=1e-5, atol=1e-7)
    # the part of the photo that the model sees, as fractions of its sides
    assert np.multiply(shown["box"], [60, 40, 60, 40]) == pytest.approx(explained.geometry.box)
    # programs that don't ask for a map wait for none
    assert "maps" not in client.post("/predict", files={"image": photo}).json()


def test_a_photo_gets_its_labels_and_the_map_of_each(bundle: Bundle, photo: bytes) -> None:
    point = {"rule": "f1", "thresholds": {"ant": 0.0, "cow": 0.01}, "num_images": 9}
    labels = replace(
        bundle,
        data={**bundle.data, "task": "multilabel"},
        metadata=bundle.metadata | {"operating_point": point},
    )
    client = open_client(labels)
    answer = client.post("/predict?map=true", files={"image": photo}).json()
    (expected,) = vit.predict(labels, Image.open(io.BytesIO(photo)), top_k=3).predictions
    assert answer["labels"] == expected.labels
    assert len(answer["labels"]) >= 2
    assert list_classes(answer) == expected.classes
    assert len(answer["maps"]) == len(answer["labels"])
    page = client.get("/").text
    assert "finds any of 3 labels" in page
    assert "Operating point f1: predicts " in page


def test_upright_pixels_count_and_no_name_of_a_file_is_opened(
    client: TestClient, tmp_path: Path, photo: bytes
) -> None:
    exif = Image.Exif()
    # turned by 90 degrees
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(photo)).transpose(Image.Transpose.ROTATE_90)
    secret = tmp_path / "secret.png"
    secret.write_bytes(photo)
    expected = client.post("/predict", files={"image": photo}).json()
    upload = {"image": (str(secret), encode(turned, exif=exif))}
    assert client.post("/predict", files=upload).json() == expected
    for content in (str(secret).encode(), b"file://" + str(secret).encode()):
        assert client.post("/predict", files={"image": (str(secret), content)}).status_code == 422


def write_chunks() -> Iterator[bytes]:
    yield PART
    yield bytes(100)


HOSTILE: dict[str, tuple[dict[str, Any], int]] = {
    "no form": ({"json": {"path": "/etc/passwd"}}, 422),
    "a name for a file": ({"data": {"image": "/etc/passwd"}}, 422),
    "a damaged form": ({"content": b"abc", "headers": FORM}, 400),
    "an empty file": ({"files": {"image": ("a.jpg", b"")}}, 422),
    "text": ({"files": {"image": b"hello"}}, 422),
    # Pillow would start a program for it
    "PostScript": ({"files": {"image": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n"}}, 422),
    "many pixels": ({"files": {"image": encode(Image.new("1", (20_000, 20_000)))}}, 422),
    "many bytes": ({"files": {"image": bytes(20 * 2**20)}}, 413),
    "a body without a length": ({"content": write_chunks(), "headers": FORM}, 411),
    "a length and chunks": (
        {
            "content": b"0\r\n\r\n",
            "headers": FORM | {"content-length": "5", "transfer-encoding": "chunked"},
        },
        411,
    ),
    "a length that is no number": (
        {"content": PART, "headers": FORM | {"content-length": "-1"}},
        411,
    ),
    "another site": (
        {"files": {"image": b"hello"}, "headers": {"sec-fetch-site": "cross-site"}},
        403,
    ),
    "a site beside it": (
        {"files": {"image": b"hello"}, "headers": {"sec-fetch-site": "same-site"}},
        403,
    ),
    "another host": ({"files": {"image": b"hello"}, "headers": {"host": "evil.example"}}, 400),
    "a longer host": (
        {"files": {"image": b"hello"}, "headers": {"host": "localhost.evil.example"}},
        400,
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_request_is_refused(client: TestClient, case: str) -> None:
    request, status = HOSTILE[case]
    response = client.post("/predict", **request)
    assert response.status_code == status
    assert "Traceback" not in response.text
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_pages_are_refused_to_other_hosts_and_answers_are_not_guessed_at(
    bundle: Bundle, client: TestClient, photo: bytes
) -> None:
    for name in ("evil.example", "evil.example:8000", ""):
        assert client.get("/", headers={"host": name}).status_code == 400
    assert client.get("/", headers={"host": "localhost:9000"}).status_code == 200
    for response in (
        client.get("/"),
        client.post("/predict", files={"image": photo}),
        client.post("/predict", files={"image": photo[:200]}),
        client.post("/predict", headers={"sec-fetch-site": "cross-site"}),
    ):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
    named = TestClient(
        serve.build_app(bundle, hosts=["*.example.com"]), base_url="http://photos.example.com"
    )
    page = named.get("/")
    assert page.status_code == 200
    # a proxy may put the page below a path: its addresses are relative
    assert "<p>ant, &lt;img src=x onerror=alert(1)&gt;, cow</p>" in page.text
    addresses = re.findall(r"""(?:src|href|action|fetch\()\s*=?\s*["'`]([^"'`]*)""", page.text)
    assert "predict?map=true" in addresses
    assert not [address for address in addresses if address.startswith("/")]


def test_requests_share_a_batch_and_have_the_answers_of_predict(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = [draw_photo(number) for number in range(40)]
    pictures = [Image.open(io.BytesIO(each)) for each in photos]
    expected = vit.predict(bundle, pictures, top_k=3).predictions
    sizes: list[int] = []
    entered, leave = threading.Event(), threading.Event()
    predict = serve._Service._predict_batch

    def wait(service: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        entered.set()
        assert leave.wait(60)
        # a failure is told to those of this batch alone
        if len(sizes) == 2:
            raise RuntimeError("no memory")
        return predict(service, batch)

    monkeypatch.setattr(serve._Service, "_predict_batch", wait)
    app = serve.build_app(bundle)
    with (
        TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client,
        ThreadPoolExecutor(len(photos)) as pool,
    ):

        def ask(photo: bytes) -> Any:
            return client.post("/predict", files={"image": photo})

        first = pool.submit(ask, photos[0])
        assert entered.wait(60)
        others = [pool.submit(ask, each) for each in photos[1:]]
        # until all wait for the model
        service = next(route.endpoint.__self__ for route in app.routes if route.path == "/predict")
        while len(service._batches._waiting) < 39:
            pass
        leave.set()
        answers = [each.result() for each in (first, *others)]
    assert sizes == [1, 32, 7]
    assert [answer.status_code for answer in answers].count(500) == 32
    for answer, prediction in zip(answers, expected, strict=True):
        if answer.status_code == 200:
            found = list_classes(answer.json())
            assert [each[:2] for each in found] == [each[:2] for each in prediction.classes]
            # another batch rounds otherwise
            expected_values = [each[2] for each in prediction.classes]
            assert [each[2] for each in found] == pytest.approx(expected_values, abs=1e-6)


def test_health_and_the_schema(bundle: Bundle, client: TestClient) -> None:
    health = client.get("/health").json()
    assert (health["sha256"], health["classes"]) == (bundle.sha256, list(NAMES))
    parameters = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["parameters"]
    assert [each["name"] for each in parameters] == ["map"]
    # the framework's own pages load scripts from another site
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


def test_a_model_without_attention_still_predicts(photo: bytes) -> None:
    import torch

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(images.mean(dim=(2, 3)))

    preprocess = vit.Preprocess((16, 16))
    bundle = Bundle.from_model(Mean(), class_names=("a", "b"), preprocess=preprocess)
    client = open_client(bundle)
    answer = client.post("/predict?map=true", files={"image": photo})
    assert answer.status_code == 200
    assert "predictions" in answer.json()


@contextmanager
def listening(bundle: Bundle) -> Iterator[str]:
    """A server on a port of its own; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(serve.build_app(bundle), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def test_the_command_answers_and_a_mistake_is_one_line(
    cli: Launcher, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    health: list[bytes] = []
    seconds: list[float] = []
    statuses: list[int] = []
    run = uvicorn.Server.run

    def ask_and_end(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        def ask() -> None:
            port = sockets[0].getsockname()[1]
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            for _ in range(20):
                before = time.perf_counter()
                connection.request("GET", "/health")
                health.append(connection.getresponse().read())
                seconds.append(time.perf_counter() - before)
            others = []
            for count in (127, 1):
                address = ("127.0.0.1", port)
                others += [socket.create_connection(address) for _ in range(count)]
                # at the second request, all are there
                for _ in range(2):
                    connection.request("GET", "/health")
                    response = connection.getresponse()
                    response.read()
                statuses.append(response.status)
            for each in (connection, *others):
                each.close()
            server.should_exit = True

        threading.Thread(target=ask).start()
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", ask_and_end)
    outcome = cli.succeed("serve", bundle.name, "--port", 0)
    assert re.search(r"http://127\.0\.0\.1:\d+  \(Ctrl-C ends it\)", outcome.err)
    assert b'"status":"ok"' in health[0]
    # no answer waits for the client to confirm its beginning, which takes 40 ms
    assert min(seconds) < 0.03
    # with 128 and with 129 clients
    assert statuses == [200, 503]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "Address already in use" in cli.fail("serve", bundle.name, "--port", port)


@pytest.mark.browser
def test_the_page_takes_a_photo_and_shows_its_map_on_two_screens(
    bundle: Bundle, photo: bytes, tmp_path: Path, browser: Any
) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    def wait_for(condition: str) -> None:
        WebDriverWait(browser, 60).until(lambda _: browser.execute_script(f"return {condition}"))

    (tmp_path / "a.png").write_bytes(photo)
    (tmp_path / "broken.png").write_bytes(photo[:2000])
    with listening(bundle) as address:
        browser.get(address)
        field = browser.find_element("id", "file")
        field.send_keys(str(tmp_path / "broken.png"))
        wait_for("document.getElementById('status').className === 'warn'")
        assert "truncated" in browser.find_element("id", "status").text
        field.send_keys(str(tmp_path / "a.png"))
        wait_for("!document.getElementById('result').hidden")
        (expected,) = vit.predict(bundle, tmp_path / "a.png").predictions
        rows = [row.text for row in browser.find_elements("css selector", "#classes tbody tr")]
        assert rows == [f"{name} {100 * value:.1f} %" for _, name, value in expected.classes]
        assert "evidence for" in browser.find_element("css selector", "figcaption").text
        # the map lies on the part of the photo that the model sees
        inside = "(([a, b]) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.width > 50)"
        boxes = "['canvas', 'canvas + img, figure:last-child img']"
        place = ".map((each) => document.querySelector(each).getBoundingClientRect())"
        assert browser.execute_script(f"return {inside}({boxes}{place})")
        for screen in ("large", "phone"):
            if screen == "large":
                assert not find_wide(browser)
                assert not find_unnamed(browser)
                assert not find_low_contrast(browser)
            else:
                with phone(browser):
                    assert not find_wide(browser)
        log = [entry for entry in browser.get_log("browser") if "422" not in entry["message"]]
    assert log == []
