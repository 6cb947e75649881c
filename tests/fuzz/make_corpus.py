"""Writes tests/fuzz/corpus, small files that once broke something: `python -m
tests.fuzz.make_corpus`.

A folder for each of the ways in which a file is given; tests/cli/test_corpus.py gives them so.
"""

import io
import json
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import _save_model
from vit.data.images import read_image
from vit.model.model_file import compute_checksum

CORPUS = Path(__file__).parent / "corpus"
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8))

CONFIGURATIONS = {
    "alias-as-value": "data:\n  classes: &a [x, x]\n  root: *a\n",
    "alias-as-merge-key": "data: &a {name: digits}\ntrain:\n  <<: [*a, *a]\n",
    "alias-bomb": "a: &a [x, x]\n"
    + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "patch-size-0": "model: {patch_size: 0}\n",
    "timestamp": "train: {seed: !!timestamp x}\n",
    "empty-int": 'train: {seed: !!int ""}\n',
    "no-bool": "train: {seed: !!bool x}\n",
    "nested": "train: {seed: " + "[" * 3000 + "]" * 3000 + "}\n",
    "image-size": "data: {image_size: 1000000000}\n",
    "crop-fraction": "data: {crop_fraction: 1.0e-320}\n",
    "key-twice": "train: {seed: 1, seed: 2}\n",
}
METADATA: dict[str, Callable[[dict], object]] = {
    "temperature-0": lambda values: values.update(temperature=0),
    "temperature-nan": lambda values: values.update(temperature=float("nan")),
    "mean-nan": lambda values: values["preprocess"].update(mean=[float("nan"), 0, 0]),
    "std-0": lambda values: values["preprocess"].update(std=[1, 1, 0]),
    "depth": lambda values: values["architecture"].update(depth=10**9),
    "embed-dim": lambda values: values["architecture"].update(embed_dim=10**9),
    "img-size": lambda values: values["architecture"].update(img_size=[10**9, 10**9]),
    "class-names-3": lambda values: values.update(class_names=3),
    "data-is-text": lambda values: values.update(data="folder"),
}


def write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    script = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    (folder / "postscript.jpg").write_text(script)
    (folder / "dds.png").write_bytes(b"DDS " + struct.pack("<I", 124) + rng.bytes(200))
    (folder / "blp.png").write_bytes(b"BLP2\1\0\0\0" + rng.bytes(200))
    (folder / "spider.png").write_bytes(struct.pack(">27f", *[1.0] * 27) + rng.bytes(200))
    (folder / "address.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    PHOTO.save(whole := io.BytesIO(), format="avif")
    content = whole.getvalue()
    left = 3
    for place in range(12, len(content), 20):
        path = folder / f"damaged-{place}.avif"
        path.write_bytes(content[:place] + b"\xaa" + content[place + 1 :])
        try:
            read_image(path)
        except ValueError:
            left -= 1
        else:
            path.unlink()
        if left == 0:
            return


def write_models(folder: Path) -> None:
    folder.mkdir()
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 4, "depth": 1, "num_heads": 1}
    whole = _save_model(folder / "whole.safetensors", class_names=("[/]", "b"), **sizes)
    content = whole.read_bytes()
    (folder / "bit.safetensors").write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    with safe_open(whole, framework="pt") as file:
        text = file.metadata()["vit"]
    for name, change in METADATA.items():
        tensors = load_file(whole)
        metadata = json.loads(text)
        change(metadata)
        metadata.pop("content_sha256", None)
        metadata["content_sha256"] = compute_checksum(tensors, metadata)
        path = folder / f"{name}.safetensors"
        save_file(tensors, path, metadata={"vit": json.dumps(metadata)})


def write_shards(folder: Path) -> None:
    folder.mkdir()
    PHOTO.save(photo := io.BytesIO(), format="png")
    for name in ("label", "digits", "dangling-link"):
        with tarfile.open(folder / f"{name}.tar", "w", bufsize=512) as tar:
            image, label = tarfile.TarInfo("0.png"), tarfile.TarInfo("0.cls")
            image.size = len(photo.getvalue())
            tar.addfile(image, io.BytesIO(photo.getvalue()))
            text = {"label": b"1000000000", "digits": b"9" * 5000}.get(name, b"")
            label.size = len(text)
            if not text:
                label.type, label.linkname = tarfile.SYMTYPE, "gone"
            tar.addfile(label, io.BytesIO(text))


def write_checkpoints(folder: Path) -> None:
    folder.mkdir()
    for name, state in {
        "list": [1],
        "tensor": torch.ones(1),
        "expanded": {"x": torch.zeros(1).expand(10**6)},
    }.items():
        torch.save(state, buffer := io.BytesIO())
        digest = sha256(buffer.getvalue()).hexdigest()[:16]
        (folder / name).mkdir()
        (folder / name / f"step-00000002-{digest}.pt").write_bytes(buffer.getvalue())


def write_large_image(path: Path, *, side: int) -> None:
    """16-bit grey of one value: 50 MB in 49 kB."""
    row = zlib.compressobj(9)
    content = b"".join(row.compress(b"\0" + b"\x12\x34" * side) for _ in range(side)) + row.flush()
    head = struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", content), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))


def write_results(folder: Path) -> None:
    """Contents that replace a result of ours: NAME/FILE."""
    for name, content in {
        "empty/index.npz": b"",
        "header/index.npz": b"\x93NUMPY\x01\0v\0{'descr': '|O', 'shape': (9,), 'fortran_order': False}",
        "empty/maps.npz": b"",
        "header/maps.npz": b"PK\x03\x04 nothing",
        "list/manifest.json": b"[]",
        "bytes/manifest.json": b"\xff",
        "nested/manifest.json": b"[" * 3000,
        "number/metrics.jsonl": b"3\n",
        "list/metrics.jsonl": b"[1]\n",
        "text/metrics.jsonl": b'{"epoch": 1, "step": "x"}\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        new = Path(name)
        (new / "configurations").mkdir()
        for key, text in CONFIGURATIONS.items():
            (new / "configurations" / f"{key}.yaml").write_text(text)
        write_images(new / "images")
        write_models(new / "models")
        write_shards(new / "shards")
        write_checkpoints(new / "checkpoints")
        write_results(new / "results")
        (new / "large").mkdir()
        write_large_image(new / "large" / "16-bit.png", side=5000)
        (new / "lists").mkdir()
        (new / "lists" / "long-name.txt").write_text("x" * 300 + "\n")
        for path in (path for path in new.rglob("*") if path.is_file()):
            target = CORPUS / path.relative_to(new)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
