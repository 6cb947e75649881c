"""The ONNX file that takes normalised images, its examples, and the runtimes that the card names."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from deploy_parity import NODE_PACKAGES
from PIL import Image
from sklearn.datasets import load_sample_images

import vit
from tests.conftest import Launcher, SaveModel
from vit.bundle import load_bundle, update_metadata
from vit.data.preprocess import Preprocess, ResizeMode
from vit.deploy.export.tensor_files import write_tensor_files

CARD = Path(__file__).parents[3] / "vit/deploy/export/templates/README.md.jinja"


@pytest.fixture
def model_file(save_model: SaveModel, tmp_path: Path) -> Path:
    path = save_model(
        tmp_path / "model.safetensors",
        class_names=tuple("abcdefghij"),
        preprocess=Preprocess((32, 32), crop_pct=0.875),
        img_size=32,
        patch_size=8,
        class_token=True,
    )
    update_metadata(path, {"temperature": 1.7})
    return path


@pytest.mark.parametrize(
    ("options", "atol"),
    [
        ((), 1e-5),
        pytest.param(("--opset", 17, "--batch-size", 2), 1e-5, marks=pytest.mark.extended),
        pytest.param(("--opset", 25, "--attention"), 1e-5, marks=pytest.mark.extended),
        pytest.param(("--precision", "float16"), 1e-2, marks=pytest.mark.extended),
    ],
)
def test_tensors_give_the_logits_of_the_model(
    options: tuple[str, ...], atol: float, model_file: Path, cli: Launcher, tmp_path: Path
) -> None:
    cli.succeed("export", model_file, "--input", "tensor", "--output", tmp_path / "out", *options)
    written = onnx.load(tmp_path / "out/model.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert not {node.op_type for node in written.graph.node} & {"If", "Loop"}
    types = {tensor.data_type for tensor in written.graph.initializer}
    assert onnx.TensorProto.DOUBLE not in types
    assert (onnx.TensorProto.FLOAT16 in types) == ("float16" in options)
    assert written.opset_import[0].version == (options[1] if "--opset" in options else 20)

    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    (given,) = session.get_inputs()
    batch = 2 if "--batch-size" in options else "batch"
    assert (given.name, given.type, given.shape) == (
        "pixel_values",
        "tensor(float)",
        [batch, 3, 32, 32],
    )
    attention = ["attention"] if "--attention" in options else []
    names = [output.name for output in session.get_outputs()]
    assert names == ["logits", "probabilities", *attention, "features"]

    bundle = load_bundle(model_file)
    images = torch.randn(2, 3, 32, 32)
    found = dict(zip(names, session.run(None, {"pixel_values": images.numpy()}), strict=True))
    assert {values.dtype for values in found.values()} == {np.dtype("float32")}
    with torch.no_grad():
        logits = bundle.model(images) / 1.7
    np.testing.assert_allclose(found["logits"], logits, atol=atol)
    np.testing.assert_allclose(found["probabilities"], logits.softmax(dim=1), atol=atol)
    if batch == "batch":
        (one,) = session.run(["logits"], {"pixel_values": images[:1].numpy()})
        np.testing.assert_allclose(one, logits[:1], atol=atol)


@pytest.mark.extended
@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_examples_predict_as_vit_does(
    batch_size: int | None, model_file: Path, tmp_path: Path
) -> None:
    file = vit.export_model(
        model_file, input="tensor", output=tmp_path / "out", batch_size=batch_size
    )
    folder = file.parent
    photo = tmp_path / "photo.png"
    Image.fromarray(load_sample_images().images[0]).save(photo)
    prediction = vit.predict(model_file, photo, top_k=10, precision="float32").predictions[0]
    expected = [probability for _, _, probability in sorted(prediction.classes)]
    command = [sys.executable, folder / "example.py", photo]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(told.removeprefix(f"{photo} ")) == pytest.approx(expected, abs=1e-5)
    photos = vit.export_model(model_file, output=tmp_path / "photo", batch_size=batch_size).parent
    command = [sys.executable, photos / "predict.py", photo]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    answers = json.loads(told)["predictions"]
    assert [answer["probability"] for answer in answers] == pytest.approx(
        sorted(expected, reverse=True)[:5], abs=1e-5
    )
    if not shutil.which("npm"):
        pytest.skip("node is missing")
    subprocess.run(
        ["npm", "install", "--ignore-scripts", "--no-audit", *NODE_PACKAGES],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    with Image.open(photo) as image:
        load_bundle(model_file).preprocess.to_uint8(image).tofile(folder / "pixels")
    command = ["node", "example.mjs", "pixels"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == pytest.approx(expected, abs=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_example_in_c_predicts_as_vit_does(
    batch_size: int | None, model_file: Path, tmp_path: Path
) -> None:
    """The library is in Python's package, the headers are in Debian's libonnxruntime-dev."""
    headers = ["-I/usr/include/onnxruntime", "-include", "onnxruntime_cxx_api.h"]
    compiler = shutil.which("g++") or pytest.skip("g++ is missing")
    check = [compiler, *headers, "-fsyntax-only", "-x", "c++", "/dev/null"]
    if subprocess.run(check, capture_output=True, check=False).returncode:
        pytest.skip("the headers of onnxruntime are missing; CPLUS_INCLUDE_PATH may name them")
    file = vit.export_model(
        model_file, input="tensor", output=tmp_path / "out", batch_size=batch_size
    )
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (tmp_path / "lib").mkdir()
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / "lib" / name).symlink_to(library)
    options = ["-std=c++17", "-Wall", "-Werror", f"-L{tmp_path}/lib", f"-Wl,-rpath,{tmp_path}/lib"]
    command = [compiler, "example.cpp", headers[0], *options, "-lonnxruntime", "-o", "example"]
    subprocess.run(command, cwd=file.parent, check=True)

    image = Image.fromarray(load_sample_images().images[0])
    pixels = load_bundle(model_file).preprocess.to_uint8(image).tobytes()
    command = ["./example"]
    told = subprocess.run(command, cwd=file.parent, input=pixels, capture_output=True, check=True)
    prediction = vit.predict(model_file, image, top_k=10, precision="float32").predictions[0]
    expected = [probability for _, _, probability in sorted(prediction.classes)]
    assert [float(line) for line in told.stdout.split()] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("size", [(300, 200), (20, 333), (1, 9), (40, 24)])
def test_the_example_resizes_as_vit_does(
    mode: ResizeMode, size: tuple[int, int], tmp_path: Path
) -> None:
    preprocess = Preprocess((24, 40), crop_pct=0.9, resize_mode=mode, interpolation="bilinear")
    write_tensor_files(tmp_path, preprocess, batch_size=1)
    facts = json.loads((tmp_path / "preprocess.json").read_text())
    assert facts["size"] == {"height": 24, "width": 40}
    code = (tmp_path / "example.py").read_text()
    # its lines between the reading and the session
    (resize,) = re.findall(r"read_rgb\(path\)\n(.*?)    print\(", code, re.DOTALL)
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
    head = code[code.index("resample = ") : code.index("for path")]
    scope = {
        "np": np,
        "Image": Image,
        "image": image,
        "ImageOps": __import__("PIL.ImageOps").ImageOps,
    }
    exec(head + "if True:\n" + resize, scope)
    values = torch.from_numpy(scope["pixel_values"])
    torch.testing.assert_close(values, preprocess([image]), atol=1e-6, rtol=0)


@pytest.mark.extended
def test_two_machines_write_the_same_bytes(model_file: Path, tmp_path: Path) -> None:
    program = "import sys, vit\nfor form in ('photo', 'tensor'):\n    "
    program += "vit.export_model(sys.argv[1], input=form, output=form)"
    files = []
    for number in ("1", "2"):
        folder = tmp_path / number
        folder.mkdir()
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path.cwd())}
        environment |= {"HOME": str(folder), "PYTHONHASHSEED": number}
        command = [sys.executable, "-c", program, str(model_file)]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        files.append([(folder / form / "model.onnx").read_bytes() for form in ("photo", "tensor")])
    assert files[0] == files[1]


def test_the_card_names_the_versions_that_are_installed() -> None:
    rows = re.findall(r"^\| (\w[\w-]*) \| ([\d.]+) \|", CARD.read_text(), re.MULTILINE)
    versions = dict(rows)
    assert set(versions) == {"onnxruntime", "onnxruntime-node", "onnxruntime-web", "openvino"}
    for name in ("onnxruntime", "openvino"):
        assert versions[name] == importlib.metadata.version(name)
    packages = {f"{name}@{versions[name]}" for name in versions if "-" in name}
    assert packages == set(NODE_PACKAGES)


@pytest.mark.extended
def test_openvino_with_its_defaults_gets_the_pixels(model_file: Path, tmp_path: Path) -> None:
    """Also in the first inference, and where it computes in bfloat16."""
    import openvino

    path = vit.export_model(model_file, output=tmp_path / "out")
    preprocess, random = load_bundle(model_file).preprocess, np.random.default_rng(0)
    session = onnxruntime.InferenceSession(path)
    for options, atol in (({}, 0.05), ({"INFERENCE_PRECISION_HINT": "f32"}, 1e-3)):
        compiled = openvino.Core().compile_model(path, "CPU", options)
        for size in ((30, 30), (333, 250), (250, 900), (900, 250)):
            pixels = random.integers(0, 256, (1, *size, 3), dtype=np.uint8)
            found = compiled({"images": pixels})
            values = preprocess([Image.fromarray(pixels[0])]).numpy()
            # a pixel in a thousand is another by one of 255
            differences = np.abs(found["pixel_values"] - values)
            assert differences.max() < 1.01 / (255 * min(preprocess.std))
            assert (differences > 1e-3).mean() < 2e-3
            (expected,) = session.run(["probabilities"], {"images": pixels})
            np.testing.assert_allclose(found["probabilities"], expected, atol=atol)
