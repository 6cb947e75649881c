"""`vit train`: what it leaves, and one line and exit code 2 for a mistake."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import vit
from tests.conftest import TINY_RUN, Launcher, save_noise
from tests.training.test_resume import assert_equal_runs
from vit.bundle import load_bundle
from vit.config import load_config

TINY = [
    "data.image_size=8",
    "model.patch_size=4",
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "train.batch_size=128",
    "train.epochs=2",
    "train.precision=float32",
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of noise, ten images each and two to test on."""
    names = [f"train/{name}/{number}.jpg" for name in ("cat", "dog") for number in range(10)]
    save_noise(tmp_path / "photos", [*names, "test/cat/0.jpg", "test/dog/0.jpg"])
    return tmp_path / "photos"


def test_a_run_leaves_what_it_promises(tiny_run: Path, cli: Launcher) -> None:
    run = tiny_run
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert {
        *("epoch", "step", "train_loss", "val_loss", "val_top1"),
        *("learning_rate", "images_per_second", "elapsed_seconds"),
    } <= rows[0].keys()
    assert list((run / "tensorboard").glob("events.*"))
    # the last two and the best
    assert len(list((run / "checkpoints").glob("step-*.pt"))) in (2, 3)
    bundle = load_bundle(run)
    assert bundle.class_names == tuple("0123456789")
    assert len(bundle.data["fingerprint"]) == 64
    assert bundle.config == load_config(run / "config.yaml").model_dump(mode="json")
    outcome = cli.succeed("info", run)
    assert bundle.data["fingerprint"] in "".join(outcome.out.split())


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_threads_that_divide_the_batch_resume_to_the_same_run(
    empty_yaml: Path, tmp_path: Path, cli: Launcher
) -> None:
    """As on every machine of several cores; the other tests train with one thread."""

    def train(output: Path, *arguments: str) -> str:
        return cli.succeed("train", *arguments, "--output", output).text

    overrides = [*TINY, "model.drop_path_rate=0.2", "optimizer.name=muon", "train.device=cpu"]
    text = train(tmp_path / "whole", str(empty_yaml), *overrides)
    assert ", 2 threads, " in text
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    max((tmp_path / "resumed" / "checkpoints").iterdir()).unlink()
    assert "resuming after step 10 of 20" in train(tmp_path / "resumed", "--resume")
    assert_equal_runs(tmp_path / "whole", tmp_path / "resumed")


def test_a_directory_with_a_run_is_not_touched_unasked(
    empty_yaml: Path, tiny_run: Path, tmp_path: Path, cli: Launcher
) -> None:
    output = shutil.copytree(tiny_run, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert "--resume, or replace it with --overwrite" in cli.fail(
        "train", empty_yaml, *TINY, "--output", output
    )
    assert "train.epochs is 4 there, 2 here" in cli.fail(
        "train", empty_yaml, *TINY_RUN, "train.epochs=2", "--output", output, "--resume"
    )
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    with pytest.raises(FileExistsError, match="already holds a run"):
        vit.train("digits", output=output)
    cli.succeed("train", "--output", output, "--resume")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    damaged = tmp_path / "damaged"
    for name in ("ant", "bee"):
        (damaged / name).mkdir(parents=True)
        for number in range(8):
            (damaged / name / f"{number}.png").write_bytes(b"no image")
    for images, message in ((damaged, "can't be read"), (tmp_path / "absent", "absent")):
        data = ["data.name=folder", f"data.root={images}", "data.image_size=8"]
        assert message in cli.fail(
            "train", empty_yaml, *TINY, *data, "--output", output, "--overwrite"
        )
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    cli.succeed("train", empty_yaml, *TINY, "--output", output, "--overwrite")
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    message = cli.fail("train", empty_yaml, *TINY, "--output", tmp_path / "foreign", "--overwrite")
    assert "thesis.tex" in message
    assert (tmp_path / "foreign" / "thesis.tex").exists()


def test_a_dry_run_shows_the_plan_and_a_batch(
    empty_yaml: Path, tmp_path: Path, cli: Launcher
) -> None:
    outcome = cli.succeed("train", empty_yaml, *TINY, "--output", tmp_path / "dry", "--dry-run")
    for word in ("parameters", "training", "validation"):
        assert word in outcome.text
    assert [path.name for path in (tmp_path / "dry").iterdir()] == ["first_batch.png"]
    with Image.open(tmp_path / "dry" / "first_batch.png") as picture:
        assert picture.width >= 8 * 8


def test_what_is_unusual_is_warned_of(
    photos: Path, empty_yaml: Path, tmp_path: Path, cli: Launcher
) -> None:
    options = ["data.name=folder", f"data.root={photos}", "train.batch_size=8", "--dry-run"]
    for name in ("test", "val"):
        (photos / "test").rename(photos / name)
        outcome = cli.succeed("train", empty_yaml, *TINY, *options, "--output", tmp_path / name)
        found = [line for line in outcome.err.splitlines() if line.startswith("warning: ")]
        assert ["val is the test split" in line for line in found] == [True] * (name == "val")


def test_results_have_a_place(
    empty_yaml: Path, tmp_path: Path, cli: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["train.max_steps=2", "train.batch_size=32", "data.image_size=8", "train.device=cpu"]
    options += ["model.depth=1", "model.embed_dim=48"]
    first = cli.succeed("train", empty_yaml, *options)
    run = Path("runs") / f"{empty_yaml.stem}-1"
    assert f"output {run}" in " ".join(first.err.split())
    assert f"next: vit evaluate {run}; vit explain {run}" in first.err
    config = load_bundle(run).config
    assert config["train"]["batch_size"] == 32
    cli.succeed("evaluate", run, "--num-examples", "0")
    assert (Path("runs") / f"{run.name}-evaluate-1" / "evaluation.json").is_file()
    second = cli.succeed("train", empty_yaml, *options, "optimizer.lr=1e-9")
    assert f"next: vit evaluate {Path('runs') / empty_yaml.stem}-2" in second.err
    assert "name it with --output" in cli.fail("train", empty_yaml, "--resume")


@pytest.mark.skipif(torch.__version__ < "2.10", reason="it imports sympy before 2.10")
def test_commands_start_without_torch_s_compiler_and_other_slow_imports(
    photos: Path, tmp_path: Path, cli: Launcher
) -> None:
    """Each takes seconds to import. The model has a convolutional stem and Muon, as `vit train
    PHOTOS` chooses. This is what `Optimizer.*.__wrapped__` in Muon and `_dynamo_marked_constant` in
    `constant_when_compiled` are for."""
    arguments = ["data.image_size=32", "train.max_steps=2", "--output", str(tmp_path / "run")]
    slow = {
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "sympy",
    }
    run = f"sys.argv = {['vit', 'train', str(photos), *arguments]}; vit.cli.main.main()"
    check = f"assert 'torch' in sys.modules and not sys.modules.keys() & {slow}"
    # The other commands start without these libraries, too.
    slow_libraries = slow | {"timm", "torchvision", "sklearn", "scipy.stats", "scipy.optimize"}
    others = "vit.evaluate, vit.predict, vit.explain"
    code = f"import sys, vit.cli.main\n{others}\nassert not sys.modules.keys() & {slow_libraries}"
    code += f"\ntry: {run}\nexcept SystemExit as end: assert not end.code\n{check}"
    cli.finish(cli.start(program=("-c", code)))


def test_a_run_that_fails_leaves_no_new_directory(
    cli: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.fail("train", "digits", "data.subset=[1]", "train.batch_size=0")
    assert not list(tmp_path.iterdir())

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no data")

    monkeypatch.setattr("vit.training.train_model.build_run", fail)
    assert "no data" in cli.fail("train", "digits")
    assert not list(tmp_path.glob("runs/*"))
