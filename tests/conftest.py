"""Shared by all tests: array shapes are checked while they run, one cache, one launcher of
commands, one tiny model."""

import contextlib
import gc
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest

import vit.runtime.memory
from vit.runtime.locks import lock_file

# a command that runs inside a test would set it for all that follow, whose process then stays at
# its largest size
vit.runtime.memory.keep_freed_memory = lambda: False

# a disk takes some 10 ms for each of thousands of calls. What is flushed, and when, is what
# tests/training/test_power_cut.py notes; programs of their own flush as ever
os.fsync = lambda descriptor: None

_decorate = jaxtyping.jaxtyped


def _check_shapes(function: Any = None, **options: Any) -> Any:
    """jaxtyping's own for what has arrays in its signature. To decorate a function takes milliseconds,
    and one that is defined in another one is decorated each time that the other one is called."""
    if function is None:
        return lambda function: _check_shapes(function, **options)
    annotations = str(getattr(function, "__annotations__", ""))
    return _decorate(function, **options) if "jaxtyping." in annotations else function


# before any module below is imported: each annotated call then checks its array shapes, which takes
# a seventh of the time of their tests
jaxtyping.jaxtyped = _check_shapes
jaxtyping.install_import_hook(
    [
        "vit.model",
        "vit.explanation",
        "vit.data.loader",
        "vit.data.augment",
        "vit.data.random",
        "vit.data.workers",
    ],
    "beartype.beartype",
)

# half a million objects of imported modules live until the end. Looking through them again and
# again for garbage took a fifteenth of the time of the tests
gc.disable()

# where transformers, once imported, copies the code of model folders to: one place for a process,
# never the user's
_REMOTE_CODE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
os.environ["HF_MODULES_CACHE"] = _REMOTE_CODE.name

ROOT = Path(__file__).parents[1]
TINY_RUN = [
    "data.name=digits",
    "data.image_size=8",
    "model.patch_size=2",
    "model.embed_dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "optimizer.name=muon",
    "optimizer.lr=6e-3",
    "optimizer.muon_lr=0.02",
    "schedule.warmup_epochs=0.2",
    "train.batch_size=64",
    "train.epochs=4",
    "train.device=cpu",
    "train.precision=float32",
]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(7000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    # plugins that are imported now look for who refers to their objects
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def vit_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of downloads and decoded images, for the whole session: never the user's
    own."""
    folder = tmp_path_factory.mktemp("vit_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIT_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def quick_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explain images in reports only in the tests of reports and of `vit evaluate`. Elsewhere a report
    is a by-product, and this would add a second to each evaluation."""
    if request.path.name in ("test_contrast.py", "test_evaluate.py", "test_report.py"):
        return
    monkeypatch.setattr(
        "vit.evaluation.report.report.explain_mistakes",
        lambda _, mistakes, __: [None] * len(mistakes),
    )


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one test, in which nothing lies yet."""
    folder = tmp_path / "empty_cache"
    monkeypatch.setenv("VIT_CACHE", str(folder))
    return folder


BuildOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> BuildOnce:
    """build_once(NAME, build): the folder that `build(folder)` filled, for all workers. Whichever
    asks first builds it while the others wait. Not to be written to."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def build_once(name: str, build: Callable[[Path], object]) -> Path:
        folder = shared / name
        is_built = shared / f"{name}.built"
        with lock_file(shared / f"{name}.lock"):
            if not is_built.exists():
                # what a build that failed left
                shutil.rmtree(folder, ignore_errors=True)
                build(folder)
                is_built.touch()
        return folder

    return build_once


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything on the screen, without the line breaks and columns of its layout."""
        return " ".join(f"{self.out} {self.err}".split())


class Launcher:
    """Runs `vit` commands: inside this process, or as programs of their own."""

    def run(self, *arguments: object) -> Outcome:
        """`vit ARGUMENTS` inside this process."""
        from vit.cli.main import main

        code = 0
        with (
            io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) as out,
            io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) as err,
        ):
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main([str(argument) for argument in arguments])
                except SystemExit as end:
                    code = int(end.code or 0)
            texts = [
                stream.buffer.getvalue().decode(errors="surrogateescape") for stream in (out, err)
            ]  # type: ignore[attr-defined]
        return Outcome(code, *texts)

    def succeed(self, *arguments: object) -> Outcome:
        """`run`, where anything but success fails the test with what the command said."""
        outcome = self.run(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome

    def fail(self, *arguments: object) -> str:
        """The line that a user's mistake gets: exit code 2, and nothing else on standard error."""
        outcome = self.run(*arguments)
        assert outcome.code == 2, outcome
        (line,) = outcome.err.splitlines()
        assert line.startswith("vit: error: ")
        return line

    def start(
        self,
        *arguments: object,
        processes: int = 1,
        program: Sequence[str] = ("-m", "vit"),
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """`vit ARGUMENTS`, or another Python program, by itself or as so many processes under
        torchrun."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *(torchrun if processes > 1 else []), *program]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | popen.pop("env", {})
        return subprocess.Popen(
            [*command, *map(str, arguments)], env=environment, **streams | popen
        )

    def finish(
        self, process: subprocess.Popen[Any], *, timeout: float = 300, **communicate: Any
    ) -> Outcome:
        """Wait for a program that must succeed; `input=` is what it reads from standard input."""
        out, err = process.communicate(timeout=timeout, **communicate)
        assert process.returncode == 0, err
        return Outcome(process.returncode, out, err)


@pytest.fixture(scope="session")
def cli() -> Launcher:
    return Launcher()


@pytest.fixture(scope="session")
def empty_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration in which everything has its default."""
    path = tmp_path_factory.mktemp("configuration") / "empty.yaml"
    path.touch()
    return path


@pytest.fixture(scope="session")
def tiny_run(build_once: BuildOnce, cli: Launcher, empty_yaml: Path) -> Path:
    """A run directory of a few steps on the digits: better than chance, far from perfect. Not to be
    written to."""
    return build_once(
        "tiny_run", lambda folder: cli.succeed("train", empty_yaml, *TINY_RUN, "--output", folder)
    )


@pytest.fixture(scope="session")
def tiny_model_file(tiny_run: Path) -> Path:
    return tiny_run / "model.safetensors"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model_file: Path) -> Any:
    """The tiny run's model. Shared by all tests: not to be changed."""
    from vit.bundle import load_bundle

    return load_bundle(tiny_model_file)


def save_noise(
    folder: Path, names: Iterable[str], *, size: tuple[int, int] = (20, 30), seed: int = 0
) -> list[Path]:
    """Write images of noise of one height and width below a folder, and return their paths."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return paths


def hash_images(paths: Iterable[Path]) -> Any:
    """The hashes that a model file records of its training images, a pair of uint64 [n]."""
    import numpy as np

    from vit.data.duplicates import compute_dhash, hash_pixels
    from vit.data.images import read_image

    images = [read_image(path) for path in paths]
    hashes = [[hash_pixels(image), compute_dhash(image)] for image in images]
    return tuple(np.ascontiguousarray(np.array(hashes, dtype=np.uint64).T))


def change_metadata(path: Path, values: dict[str, Any], *, target: Path | None = None) -> None:
    """Change values in the metadata of a model file, or of a copy at `target`."""
    from dataclasses import replace

    from vit.model.model_file import read_model_file, write_model_file

    content = read_model_file(path)
    metadata = {**content.metadata, **values}
    write_model_file(target or path, replace(content, metadata=metadata))


SaveModel = Callable[..., Path]


@pytest.fixture(scope="session")
def save_model() -> SaveModel:
    """save_model(path, class_names=…, …) writes the file of an untrained model in which every
    weight matters."""
    return _save_model


def _save_model(
    path: Path,
    *,
    class_names: tuple[str, ...] = ("ant", "bee", "cow"),
    preprocess: Any = None,
    config: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    training_hashes: Any = None,
    **architecture: Any,
) -> Path:
    """`architecture`: VisionTransformer's arguments that differ from a 16×16 image of 4×4 patches,
    two blocks."""
    import torch

    from vit.bundle import Bundle
    from vit.data.preprocess import Preprocess
    from vit.model.vision_transformer import VisionTransformer

    sizes = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
    } | architecture
    torch.manual_seed(0)
    model = VisionTransformer(num_classes=len(class_names), **sizes).eval()
    for parameter in (
        model.parameters()
    ):  # fresh biases and tokens are zero, and would hide what is computed from them
        parameter.data += 0.2 * torch.randn_like(parameter)
    path.parent.mkdir(parents=True, exist_ok=True)
    bundle = Bundle(
        model=model,
        preprocess=preprocess or Preprocess(image_size=model.patch_embed.img_size),
        class_names=class_names,
        name="",
        sha256="",
        config=config or {},
        data=data or {},
        training_hashes=training_hashes,
    )
    bundle.save(path)
    return path
