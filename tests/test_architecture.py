"""docs/architecture.md walks through the code as the code runs: each function that it names is called,
in the page's order, and the ways of a batch and of a photo stay short enough to follow."""

import re
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

import vit

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"

TRAINING = "From image files to an optimizer step"
EXPLAINING = "From a photo to an overlay"
PHASES = ["Before the first step", "A step", "After an epoch"]

# section → the most functions that it may name, and the most that pixels may pass
MAX_HOPS = {"Before the first step": 30, "A step": 30, "After an epoch": 20, EXPLAINING: 50}
# walk → the most types that hold images or what was made of them
MAX_TYPES = {TRAINING: 5, EXPLAINING: 6}


class Hop(NamedTuple):
    """A function or method, by its file and its qualified name."""

    path: str
    name: str


def read_section(title: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    text = PAGE.read_text(encoding="utf-8")
    match = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert match is not None, f"the page has no section '{title}'"
    level = len(match[1])
    return re.split(rf"^#{{1,{level}}} ", text[match.end() :], flags=re.MULTILINE)[0]


def read_hops(title: str) -> list[Hop]:
    """The functions that the steps of a section name, in their order."""
    steps = re.findall(r"^\d+\. (.*)$", read_section(title), re.MULTILINE)
    pairs = re.findall(r"`(vit/[\w/]+\.py)` `([\w.]+)`", "\n".join(steps))
    return [Hop(*pair) for pair in pairs]


def read_types(title: str) -> list[Hop]:
    """The classes of a section's table of types."""
    rows = re.findall(r"^\| `(vit/[\w/]+\.py)` `(\w+)` \|", read_section(title), re.MULTILINE)
    return [Hop(*row) for row in rows]


class Call(NamedTuple):
    """A function was called, or returns."""

    hop: Hop
    has_pixels: bool  # it takes or returns some


class CallRecorder:
    """Notes the functions of vit that are called, in this thread and in those that it starts."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def record(self, function: Callable[[], object]) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_anonymous = code.co_name.startswith("<")  # <lambda>, <genexpr>
        if is_anonymous or not code.co_filename.startswith(f"{ROOT}/vit/"):
            return
        if event == "call":
            num_arguments = code.co_argcount + code.co_kwonlyargcount
            values = [frame.f_locals.get(name) for name in code.co_varnames[:num_arguments]]
        else:
            values = [argument]
        hop = Hop(code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname)
        self.calls.append(Call(hop, any(map(holds_pixels, values))))


def holds_pixels(value: object) -> bool:
    """Whether it is a picture, an array or tensor of pictures, or a sequence of them."""
    if isinstance(value, Image.Image):
        return True
    if isinstance(value, np.ndarray | Tensor):
        shape = tuple(value.shape)
        return len(shape) in (3, 4) and 3 in (shape[-1], shape[-3])
    return isinstance(value, list | tuple) and len(value) > 0 and holds_pixels(value[0])


def split_phases(calls: list[Call], titles: list[str]) -> list[list[Call]]:
    """The calls of each section of the page: from the first call of its first function to that of the
    next section's."""
    starts: list[int] = []
    for title in titles:
        first = read_hops(title)[0]
        starts.append(
            next(
                number
                for number, call in enumerate(calls)
                if call.hop == first and number >= max(starts, default=0)
            )
        )
    return [calls[start:end] for start, end in pairwise([*starts, len(calls)])]


def check_section(title: str, calls: list[Call]) -> None:
    """Every function that a section names is called, in the section's order of first calls, and no more
    functions than it may name take or return pixels."""
    names = [call.hop for call in calls]
    hops = read_hops(title)
    missing = [hop for hop in hops if hop not in names]
    assert missing == [], f"'{title}' names functions that are not called there"
    assert hops == sorted(hops, key=names.index), f"'{title}' is not in the order of first calls"
    with_pixels = {call.hop for call in calls if call.has_pixels}
    assert 0 < len(with_pixels) <= MAX_HOPS[title], sorted(with_pixels)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of sixteen photos."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(32):
        path = folder / f"class {number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path)
    return folder


OVERRIDES = [
    "data.name=folder",
    "data.image_size=16",
    "data.pipeline=resident",
    "data.workers=1",
    "data.validation_fraction=0.2",
    "model.patch_size=4",
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=1",
    "augment.mixup=0.2",
    "optimizer.name=adamw",
    "train.batch_size=8",
    "train.epochs=1",
    "train.device=cpu",
    "train.precision=float32",
]


def test_a_batch_takes_the_steps_of_the_page(
    photos: Path, tmp_path: Path, empty_cache: Path
) -> None:
    overrides = [*OVERRIDES, f"data.root={photos}"]
    recorder = CallRecorder()
    recorder.record(lambda: vit.train({}, output=tmp_path / "run", overrides=overrides))

    for title, calls in zip(PHASES, split_phases(recorder.calls, PHASES), strict=True):
        check_section(title, calls)


def test_a_photo_takes_the_steps_of_the_page(
    photos: Path, tmp_path: Path, tiny_model_file: Path
) -> None:
    recorder = CallRecorder()
    recorder.record(
        lambda: vit.explain(
            tiny_model_file,
            photos,
            methods=("rollout",),
            output=tmp_path / "maps",
            formats=("png", "npz", "html"),
            device="cpu",
        )
    )
    check_section(EXPLAINING, recorder.calls)


@pytest.mark.parametrize("title", MAX_HOPS)
def test_the_page_names_few_functions(title: str) -> None:
    hops = read_hops(title)
    assert 5 <= len(hops) <= MAX_HOPS[title]
    assert len(set(hops)) == len(hops)


@pytest.mark.parametrize("title", MAX_TYPES)
def test_few_types_hold_the_images(title: str) -> None:
    types = read_types(title)
    assert 0 < len(types) <= MAX_TYPES[title]
    for path, name in types:
        assert re.search(rf"^class {name}\b", (ROOT / path).read_text(), re.MULTILINE), name
