"""Compares what other runtimes answer of an exported model with `vit predict --precision float32`.

python benchmarks/deploy_parity.py MODEL … makes 80 images (of sides from 1 to 2,400, all kinds that
are read, three of them broken), and prints and writes for each client the largest difference of a probability and
the images with another first class. A client is a function from `Case` to probabilities; `CLIENTS` names them.
Node needs `npm` (the packages are installed into the work folder), the browser selenium and Chromium.
"""

import argparse
import contextlib
import functools
import http.server
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import ROOT, describe_conditions, load_result, write_result
from PIL import Image
from sklearn.datasets import load_sample_images

import vit
from vit.bundle import Bundle, open_model
from vit.data.images import read_image

NAME = "deploy-parity"
NODE_PACKAGES = ("onnxruntime-node@1.30.0", "onnxruntime-web@1.30.0")
NODE = """import fs from "node:fs";
import * as ort from "onnxruntime-node";
const session = await ort.InferenceSession.create("photo/model.onnx");
const rows = [];
for (const [file, height, width] of JSON.parse(fs.readFileSync("pixels.json"))) {
  const pixels = new ort.Tensor("uint8", new Uint8Array(fs.readFileSync(file)), [1, height, width, 3]);
  rows.push(Array.from((await session.run({ images: pixels }, ["probabilities"])).probabilities.data));
}
console.log(JSON.stringify(rows));
"""
PAGE = """<script type="module">
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
ort.env.wasm.numThreads = 1;
const read = async (file) => new Uint8Array(await (await fetch(file)).arrayBuffer());
try {
  const session = await ort.InferenceSession.create(await read("photo/model.onnx"));
  const rows = [];
  for (const [file, height, width] of await (await fetch("pixels.json")).json()) {
    const pixels = new ort.Tensor("uint8", await read(file), [1, height, width, 3]);
    rows.push(Array.from((await session.run({ images: pixels }, ["probabilities"])).probabilities.data));
  }
  window.rows = JSON.stringify(rows);
} catch (error) { window.rows = JSON.stringify({ error: String(error) }); }
</script>"""


@dataclass(frozen=True)
class Case:
    """A model, its images, and what a client may use.

    Attributes:
        model: What `vit.load_bundle` opens.
        bundle: It, loaded.
        paths: The images that can be read.
        broken: Images that can't; a client has to refuse each.
        pixels: What `vit` reads of each, RGB, uint8 [height, width, 3].
        work: Folder of the model's exports: photo, tensor and float16, and of what clients write.
    """

    model: str
    bundle: Bundle
    paths: list[Path]
    broken: list[Path]
    pixels: list[np.ndarray]
    work: Path


# probabilities [n, C] of the images of `paths`, in their order
Client = Callable[[Case], np.ndarray]


def make_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """Write 77 images that can be read, and three that can't."""
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    paths: list[Path] = []

    def save(image: Image.Image, name: str, **options: Any) -> None:
        paths.append(folder / f"{len(paths):02d}-{name}")
        image.save(paths[-1], **options)

    sizes = [(1, 1), (1, 40), (40, 1), (3, 200), (17, 23), (28, 28), (64, 48), (160, 160), (224, 224), (256, 256),
             (183, 183), (333, 250), (250, 333), (500, 375), (640, 427), (427, 640), (300, 1200), (1200, 300),
             (1024, 768), (1600, 2400), (2400, 1600), (2000, 500), (499, 501), (225, 224)]  # fmt: skip
    for number, size in enumerate(sizes):
        left, top = 31 * number % 300, 17 * number % 200
        cut = photos[number % 2].crop((left, top, left + 300, top + 227))
        save(cut.resize(size), f"{size[0]}x{size[1]}.{'png' if number % 3 else 'jpg'}")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in ("jpg", "webp"):
            save(
                photos[orientation % 2].crop((0, 0, 300, 200)),
                f"exif{orientation}.{suffix}",
                exif=exif,
            )
    for number, photo in enumerate(photos):
        photo = photo.crop((50, 20, 450, 400))
        grey, clear = photo.convert("L"), photo.copy()
        clear.putalpha(grey)
        palette = photo.quantize(64)
        alpha = b"".join(bytes([value]) for value in range(0, 256, 4))
        save(palette, "palette.png")
        save(palette, "palette-alpha.png", transparency=alpha)
        save(photo, "trns.png", transparency=photo.getpixel((5, 5)))
        save(photo.convert("CMYK"), "cmyk.jpg")
        save(Image.fromarray(np.asarray(grey).astype(np.uint16) * 257), "16-bit.png")
        save(Image.fromarray(np.asarray(grey).astype(np.int32) * 257), "i32.tif")
        save(grey.convert("1"), "1-bit.png")
        save(clear.convert("LA"), "la.png")
        save(clear, "rgba.png")
        save(clear, "rgba.webp", lossless=True)
        save(photo.convert("LAB"), "lab.tif")
        frames = [photos[1 - number].resize(photo.size)]
        for suffix in ("gif", "webp", "png"):
            save(photo, f"animated.{suffix}", save_all=True, append_images=frames)
        for suffix in ("bmp", "ppm", "avif"):
            save(photo, f"rgb.{suffix}")
        save(grey, "grey.jpg")
    save(photos[0], "progressive.jpg", progressive=True)
    assert len(paths) == 77, len(paths)

    encoded = io.BytesIO()
    photos[0].save(encoded, "jpeg")
    broken = {"truncated.jpg": encoded.getvalue()[:5000], "empty.png": b"", "text.jpg": b"no image"}
    for name, data in broken.items():
        (folder / name).write_bytes(data)
    return paths, [folder / name for name in broken]


def _run_session(case: Case, export: str) -> np.ndarray:
    import onnxruntime

    return _answer(
        onnxruntime.InferenceSession(case.work / export / "model.onnx").run, case, export
    )


def _answer(
    run: Callable[[list[str], dict[str, np.ndarray]], Any], case: Case, export: str
) -> np.ndarray:
    if export == "tensor":
        images = [
            case.bundle.preprocess([Image.fromarray(pixels)]).numpy() for pixels in case.pixels
        ]
        return np.concatenate(
            [run(["probabilities"], {"pixel_values": values})[0] for values in images]
        )
    return np.concatenate(
        [run(["probabilities"], {"images": pixels[None]})[0] for pixels in case.pixels]
    )


def _run_openvino(
    case: Case, export: str, *, is_float32: bool, is_first: bool = False
) -> np.ndarray:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32"} if is_float32 else {}
    core, path = openvino.Core(), case.work / export / "model.onnx"
    compiled = core.compile_model(path, "CPU", options)

    def run(names: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
        # the first inference of a freshly compiled model
        model = core.compile_model(path, "CPU", options) if is_first else compiled
        return [model(given)[name] for name in names]

    if is_first:
        case = Case(
            case.model, case.bundle, case.paths[::8], case.broken, case.pixels[::8], case.work
        )
    return _answer(run, case, export)


def _write_pixels(case: Case) -> None:
    subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", *NODE_PACKAGES], cwd=case.work, check=True,
                   capture_output=True)  # fmt: skip
    rows = []
    for number, pixels in enumerate(case.pixels):
        (case.work / f"{number}.rgb").write_bytes(pixels.tobytes())
        rows.append((f"{number}.rgb", *pixels.shape[:2]))
    (case.work / "pixels.json").write_text(json.dumps(rows))


def _run_node(case: Case) -> np.ndarray:
    _write_pixels(case)
    (case.work / "client.mjs").write_text(NODE)
    told = subprocess.run(
        ["node", "client.mjs"], cwd=case.work, check=True, capture_output=True
    ).stdout
    return np.array(json.loads(told))


def _run_browser(case: Case) -> np.ndarray:
    from selenium import webdriver

    _write_pixels(case)
    (case.work / "client.html").write_text(PAGE)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *told: object) -> None:
            pass

    Handler.extensions_map |= {".mjs": "text/javascript", ".wasm": "application/wasm"}
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(case.work))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(option)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        driver.set_script_timeout(500)
        driver.get(f"http://127.0.0.1:{server.server_port}/client.html")
        wait = "const done = arguments[0]; const t = setInterval(() => { if (window.rows) { clearInterval(t); "
        rows = json.loads(driver.execute_async_script(wait + "done(window.rows); } }, 200);"))
    finally:
        driver.quit()
        server.shutdown()
    if isinstance(rows, dict):
        raise RuntimeError(rows["error"])
    return np.array(rows)


def _run_vit(case: Case, precision: Any) -> np.ndarray:
    count = len(case.bundle.class_names)
    found = vit.predict(case.bundle, case.paths, top_k=count, precision=precision, device="cpu")
    rows = np.zeros((len(case.paths), count))
    for row, prediction in zip(rows, found.predictions, strict=True):
        for index, _, probability in prediction.classes:
            row[index] = probability
    return rows


def _export(case: Case, form: Any) -> Path:
    folder = case.work / form
    if not folder.exists():
        vit.export_model(case.model, output=folder, format=form)
    return folder


def _run_predict(case: Case) -> np.ndarray:
    """Run predict.py of the export, whose other classes than the five that it prints are taken from
    vit."""
    rows = _run_vit(case, "float32")
    command = [sys.executable, case.work / "photo" / "predict.py", *case.paths]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for row, line in zip(rows, told.splitlines(), strict=True):
        for answer in json.loads(line)["predictions"]:
            row[answer["index"]] = answer["probability"]
    return rows


def _run_transformers(case: Case, given: str, *, has_code: bool) -> np.ndarray:
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    folder, names = str(_export(case, "huggingface")), list(case.bundle.class_names)
    if given == "Auto classes":
        model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=has_code)
        read = AutoImageProcessor.from_pretrained(folder, trust_remote_code=has_code)
        with torch.no_grad():
            parts = [model(**read(str(path), return_tensors="pt")).logits for path in case.paths]
        return _to_probabilities(case, torch.cat(parts))
    answer = pipeline("image-classification", model=folder, trust_remote_code=has_code)
    rows = np.zeros((len(case.paths), len(names)))
    for row, path in zip(rows, case.paths, strict=True):
        for found in answer(str(path) if given == "path" else Image.open(path), top_k=len(names)):
            row[names.index(found["label"])] = found["score"]
    return rows


def _run_timm(case: Case, *, is_our_reader: bool) -> np.ndarray:
    import timm

    folder = _export(case, "timm")
    for name in ("timm_vit", "read_image"):
        if (folder / f"{name}.py").exists():
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    parts = []
    for path in case.paths:
        image = (
            sys.modules["read_image"].read_rgb(path)
            if is_our_reader
            else Image.open(path).convert("RGB")
        )
        with torch.no_grad():
            parts.append(model(transform(image)[None]))
    return _to_probabilities(case, torch.cat(parts))


def _to_probabilities(case: Case, logits: torch.Tensor) -> np.ndarray:
    return (logits.sigmoid() if case.bundle.is_multilabel else logits.softmax(dim=1)).numpy()


CLIENTS: dict[str, Client] = {
    "vit predict, default precision": functools.partial(_run_vit, precision="auto"),
    "onnxruntime, photo": functools.partial(_run_session, export="photo"),
    "onnxruntime, tensor": functools.partial(_run_session, export="tensor"),
    "onnxruntime, photo in float16": functools.partial(_run_session, export="float16"),
    "onnxruntime-node, photo": _run_node,
    "onnxruntime-web, photo, wasm in Chromium": _run_browser,
    "OpenVINO by default, photo": functools.partial(
        _run_openvino, export="photo", is_float32=False
    ),
    "OpenVINO by default, photo, first inference": functools.partial(
        _run_openvino, export="photo", is_float32=False, is_first=True
    ),
    "OpenVINO by default, tensor": functools.partial(
        _run_openvino, export="tensor", is_float32=False
    ),
    "OpenVINO with the f32 hint, photo": functools.partial(
        _run_openvino, export="photo", is_float32=True
    ),
    "OpenVINO with the f32 hint, photo, first inference": functools.partial(
        _run_openvino, export="photo", is_float32=True, is_first=True
    ),
    "OpenVINO with the f32 hint, tensor": functools.partial(
        _run_openvino, export="tensor", is_float32=True
    ),
    "predict.py": _run_predict,
    "transformers without code, pipeline(path)": functools.partial(
        _run_transformers, given="path", has_code=False
    ),
    "transformers with code, pipeline(path)": functools.partial(
        _run_transformers, given="path", has_code=True
    ),
    "transformers with code, pipeline(PIL)": functools.partial(
        _run_transformers, given="PIL", has_code=True
    ),
    "transformers with code, Auto classes": functools.partial(
        _run_transformers, given="Auto classes", has_code=True
    ),
    'timm, Image.open().convert("RGB")': functools.partial(_run_timm, is_our_reader=False),
    "timm, read_rgb": functools.partial(_run_timm, is_our_reader=True),
}


def compare(found: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Compare probabilities [n, C]; of fewer images, those that the first inferences take."""
    if len(found) < len(expected):
        expected = expected[::8]
    differences = np.abs(found - expected).max(axis=1)
    return {
        "max_difference": float(differences.max()),
        "median_difference": float(np.median(differences)),
        "other_top1": int((found.argmax(axis=1) != expected.argmax(axis=1)).sum()),
        "num_images": len(found),
    }


def measure(model: str, images: Path, names: Sequence[str], work: Path) -> dict[str, Any]:
    """Compare the clients of these names with `vit predict --precision float32`, for one model."""
    images.mkdir(parents=True, exist_ok=True)
    paths, broken = make_images(images)
    bundle = open_model(model, device="cpu")
    for export, options in (
        ("photo", {}),
        ("tensor", {"input": "tensor"}),
        ("float16", {"precision": "float16"}),
    ):
        vit.export_model(model, output=work / export, **options)  # type: ignore[arg-type]
    pixels = [np.asarray(bundle.preprocess.to_rgb(read_image(path))) for path in paths]
    for path in broken:
        with contextlib.suppress(OSError, ValueError):
            read_image(path)
            raise AssertionError(f"{path} was read")
    case = Case(model, bundle, paths, broken, pixels, work)
    expected = _run_vit(case, "float32")
    rows: dict[str, Any] = {}
    for name in names:
        try:
            rows[name] = compare(CLIENTS[name](case), expected)
        except Exception as error:  # a client that isn't here
            rows[name] = {"not_run": f"{type(error).__name__}: {error}"[:200]}
        print(model, "|", name, "|", rows[name], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument(
        "--clients", nargs="+", default=list(CLIENTS), choices=list(CLIENTS), metavar="CLIENT"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    machine = describe_conditions("cpu")
    # rows of clients that aren't asked for stay
    result = load_result(arguments.output, NAME, machine) or {"models": {}}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            rows = measure(model, work / "images", arguments.clients, work)
        result["models"].setdefault(Path(model).name, {}).update(rows)
        write_result(arguments.output, NAME, {**result, "machine": machine})


if __name__ == "__main__":
    main()
