"""The files beside an ONNX file that takes tensors: its preprocessing, and programs that use it."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vit.data.preprocess import Preprocess
from vit.deploy.export.python_formats import write_program
from vit.runtime.files import write_json, write_text


def describe_preprocess(preprocess: Preprocess) -> dict[str, Any]:
    """Return the content of preprocess.json, in the terms of timm and transformers.

    Images are resized to `resize_size` in `resize_mode`, "crop" (covering it, from the centre),
    "pad" (inside it, on `ground`) or "stretch". `size` is cut from the centre. Pixels 0…255 are
    multiplied by `rescale_factor`; `mean` is subtracted, and the rest divided by `std`.
    """

    def name_sides(size: tuple[int, int]) -> dict[str, int]:
        return dict(zip(("height", "width"), size, strict=True))

    return {
        "size": name_sides(preprocess.image_size),
        "resize_size": name_sides(preprocess.resize_size),
        "resize_mode": preprocess.resize_mode,
        "interpolation": preprocess.interpolation,
        "antialias": True,
        "ground": preprocess.ground,
        "value_range": preprocess.value_range,
        "rescale_factor": 1 / 255,
        "mean": preprocess.mean,
        "std": preprocess.std,
        "channels": "RGB",
        "layout": "NCHW",
    }


def write_tensor_files(directory: Path, preprocess: Preprocess, *, batch_size: int) -> None:
    """Write preprocess.json, read_image.py, and the examples in Python, JavaScript and C++, which fill
    a batch with copies of one image."""
    facts = describe_preprocess(preprocess)
    write_json(directory / "preprocess.json", facts)
    write_program(directory / "read_image.py")
    environment = Environment(
        loader=PackageLoader("vit", "deploy/export/templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    for name in ("example.py", "example.mjs", "example.cpp"):
        template = environment.get_template(f"{name}.jinja")
        write_text(directory / name, template.render(facts, batch_size=batch_size))
