"""`benchmarks/gpu.py`, rehearsed at small size: on the day that there is a GPU, nothing in it is new."""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import conditions
import gpu
import parity
import pytest
import recipe_step
import recipe_steps
import step_cost
import torch
from recipe_step import load_recipe

from vit.model.presets import compute_flops
from vit.training.recipe import list_recipes

ROOT = Path(__file__).parents[1]


def run_script(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """A benchmark's `main`, as its command runs it."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
    script.main()


def read_result(folder: Path, name: str) -> dict[str, Any]:
    (path,) = folder.glob(f"{name}-*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    assert {"device", "command", "commit", "torch"} <= set(result["machine"])
    return result


def count_rows(table: str) -> int:
    """Of a Markdown table, without its header; all rows have as many cells."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    return len(lines) - 2


def make_options(**changes: Any) -> argparse.Namespace:
    options = {
        "small": False,
        "device": "cpu",
        "output": Path("out"),
        "vit_explain": Path("x"),
        "parts": None,
        "call": None,
    }
    return argparse.Namespace(**options | changes)


class Parsed(Exception):
    """The options of a script were accepted."""


@pytest.mark.parametrize("small", [False, True])
def test_every_part_is_a_script_that_takes_its_options(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Parsed

    tests, *parts = gpu.list_parts(make_options(small=small), Path("images"))
    assert (ROOT / tests.command[-1]).is_dir()
    for part in parts:
        script = importlib.import_module(Path(part.command[1]).stem)
        monkeypatch.setattr(script, "describe_conditions", stop)
        monkeypatch.chdir(ROOT)
        with pytest.raises(Parsed):
            run_script(script, monkeypatch, *part.command[2:])


@pytest.mark.parametrize("call", [1, 2, 3])
def test_the_parts_of_a_call_end_in_its_time(call: int) -> None:
    parts = gpu.list_parts(make_options(call=call), Path("images"))
    assert len(parts) >= 2
    assert sum(part.limit for part in parts) <= 60 * gpu.MINUTES < 600


def test_a_part_that_fails_or_hangs_leaves_the_others_alone(tmp_path: Path) -> None:
    programs = {
        "fails": "import sys; print('why'); sys.exit(3)",
        "hangs": "import time; time.sleep(60)",
        "works": "import os; assert os.environ['VIT_CACHE']",
    }
    parts = [
        gpu.Part(name, 1, 1 if name == "hangs" else 20, [sys.executable, "-c", program])
        for name, program in programs.items()
    ]
    environment = gpu.build_environment("cpu", scratch=tmp_path, packages=None)
    written: list[dict[str, Any]] = []

    def run(parts: list[gpu.Part], minutes: float) -> None:
        gpu.run_parts(
            parts,
            minutes=minutes,
            environment=environment,
            folder=tmp_path,
            write=lambda results: written.append(dict(results)),
        )

    run(parts, 1)
    assert [len(results) for results in written] == [1, 2, 3]
    assert [part["ended"] for part in written[-1].values()] == [
        "exit code 3",
        "out of time",
        "passed",
    ]
    assert written[-1]["fails"]["output"] == ["why"]
    run(parts[:1], 0.01)
    assert written[-1] == {"fails": {"ended": "no time left", "seconds": 0.0, "limit": 20}}
    machine = {"device": "cpu", "torch": "2", "commit": "a"}
    assert count_rows(gpu.build_table({"machine": machine, "parts": written[2]})) == 3


@pytest.mark.extended
def test_a_part_that_is_stopped_keeps_what_it_has_measured(tmp_path: Path) -> None:
    """The second variant of the steps takes longer than the part may."""
    command = [sys.executable, str(ROOT / "benchmarks" / "recipe_steps.py"), "cifar10/speedrun"]
    command += ["--device", "cpu", "--small", "--seconds", "0.1", "--output", str(tmp_path / "out")]
    hanging = [*command, "--variants", "plain", "compiled"]
    slow = tmp_path / "slow"
    slow.mkdir()
    # what Python runs at its start: compiling takes forever
    (slow / "sitecustomize.py").write_text(
        "import time, torch\ntorch.compile = lambda *_, **__: time.sleep(600)\n"
    )
    environment = gpu.build_environment("cpu", scratch=tmp_path, packages=slow)
    process = subprocess.Popen(hanging, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list((tmp_path / "out").glob("*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    result = read_result(tmp_path / "out", recipe_steps.NAME)
    assert list(result["recipes"]["cifar10/speedrun"]) == ["plain"]
    assert count_rows(recipe_steps.build_tables(result)) == 1


def test_packages_come_from_wheels_and_the_commit_from_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "unheard_of-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("unheard_of.py", "value = 7")
        wheel.writestr("unheard_of-1.0.dist-info/METADATA", "Name: unheard-of\nVersion: 1.0\n")
    packages = gpu.unpack_wheels(wheels, tmp_path)
    environment = gpu.build_environment("cpu", scratch=tmp_path, packages=packages)
    program = "import unheard_of, importlib.metadata as m; print(unheard_of.value, m.version('unheard-of'))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7", "1.0"]
    monkeypatch.setenv("VIT_COMMIT", "abc123")
    assert conditions.find_commit() == "abc123"
    monkeypatch.delenv("VIT_COMMIT")
    # there is no git
    monkeypatch.setenv("PATH", str(tmp_path))
    assert conditions.find_commit() == "unknown"


def test_images_come_from_a_folder_an_archive_or_noise(tmp_path: Path) -> None:
    noise = gpu.prepare_images(None, tmp_path)
    assert len(list(noise.glob("train/*/*.png"))) == 120
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        archive.add(noise, "cifar10")
    unpacked = gpu.prepare_images(tmp_path / "images.tar", tmp_path / "unpacked")
    assert len(list(unpacked.glob("test/*/*.png"))) == 20
    assert gpu.prepare_images(noise, tmp_path) == noise


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.list_missing() == []
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "2.10.1" if name == "torch" else "999"
    )
    assert gpu.list_missing() == ["torch>=2.11 (2.10.1 is installed)"]


def test_steps_of_a_recipe_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "--device",
        "cpu",
        "--small",
        "--seconds",
        0.1,
        "--variants",
        "plain",
        "graph",
        "--output",
        tmp_path,
    ]
    run_script(recipe_steps, monkeypatch, "cifar10/speedrun", *options)
    result = read_result(tmp_path, recipe_steps.NAME)
    assert all(rate > 0 for rate in result["device_rates"].values())
    variants = result["recipes"]["cifar10/speedrun"]
    assert variants["plain"]["images_per_second"] > 0
    assert "error" in variants["graph"]  # there is no CUDA here, and the other one was measured
    assert count_rows(recipe_steps.build_tables(result)) == 2


def test_a_device_is_compared_with_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(parity, monkeypatch, "digits", "--device", "cpu", "--output", tmp_path)
    result = read_result(tmp_path, parity.NAME)
    found = result["recipes"]["digits"]
    assert set(found["device, float32"].values()) == {0.0}
    assert 0 < found["device, bfloat16"]["losses"] < parity.TOLERANCES["bfloat16"]
    assert count_rows(parity.build_tables(result)) == 3


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 counts no FLOPs of a CPU's fused attention"
)
def test_the_cost_on_paper_has_the_models_flops_and_fuses_the_rest() -> None:
    short = ["model.depth=2", "train.batch_size=8"]
    recipe = step_cost.describe_recipe("cifar10/speedrun", *short, "optimizer.name=adamw")
    small, large = recipe["sizes"]
    assert (small["image_size"], large["image_size"]) == ([24, 24], [32, 32])
    config = load_recipe("cifar10/speedrun", "model.depth=2")
    architecture = config.model.model_dump(exclude={"init", "preset", "probe", "freeze"}) | {
        "img_size": 32,
        "num_classes": 10,
    }
    forward = 8 * compute_flops(architecture)
    assert large["flops"] == pytest.approx(
        3 * forward, rel=0.03
    )  # the first layer needs no gradient of the pixels
    assert (
        step_cost.describe_recipe("cifar10/speedrun", *short)["sizes"][1]["flops"]
        > 2 * large["flops"]
    )  # Muon's
    for of in recipe["sizes"]:
        assert of["compiled"]["bytes"] < of["eager"]["bytes"]
        assert of["update"]["launches"] < of["compiled"]["launches"] < of["eager"]["launches"]
        assert of["compiled"]["H100"]["seconds"] < of["eager"]["L4"]["seconds"]


def test_the_result_on_paper_is_of_the_recipes_as_they_are() -> None:
    result = read_result(ROOT / "benchmarks" / "results", step_cost.NAME)
    assert set(result["recipes"]) == set(list_recipes())
    for name, recipe in result["recipes"].items():
        config = load_recipe(name)
        assert recipe["batch_size"] == config.train.batch_size, (
            f"{name}: run benchmarks/step_cost.py"
        )
        assert recipe["total_steps"] == recipe_step.build_run_plan(config).total_steps
        assert [of["image_size"] for of in recipe["sizes"]] == [
            list(size) for _, size in recipe_step.list_sizes(config)
        ]


def test_the_tables_show_the_results_of_every_part() -> None:
    machine = {"device": "NVIDIA H100", "torch": "2", "commit": "a"}
    of_variant = {"images_per_second": 1000.0}
    run = {"seed": 0, "test_top1": 0.941, "curve": [{"seconds": 20.5, "epoch": 5, "top1": 0.91}]}
    results = {
        "gpu": {"machine": machine, "parts": {"tests": {"ended": "passed", "seconds": 9.0}}},
        "recipe-cifar10-speedrun": {"machine": machine, "runs": [run]},
        "train-throughput": {
            "machine": machine,
            "images": "32 px",
            "variants": {"engine": of_variant},
        },
    }
    page = gpu.build_tables(lambda kind: {kind: results[kind]} if kind in results else {})
    for text in (
        "| tests | passed | 9 |",
        "validation 85% after 20.5 s, 90% after 20.5 s, 92% after – s from process start; test 94.1%",
    ):
        assert text in page
    assert "| `vit train` | 1,000 | – |" in page
    assert gpu.build_tables(lambda kind: {}) == "Not measured yet."


@pytest.mark.slow
def test_the_whole_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(gpu, monkeypatch, "--device", "cpu", "--small", "--output", tmp_path)
    result = read_result(tmp_path, gpu.NAME)
    assert {name: part["ended"] for name, part in result["parts"].items()} == dict.fromkeys(
        result["parts"], "passed"
    )
    names = (
        "attention-programs",
        "parity",
        "recipe-cifar10-speedrun",
        "recipe-steps",
        "timm-baseline",
        "train-throughput",
    )
    assert all(read_result(tmp_path, name) for name in names)
    assert len(list(tmp_path.iterdir())) == len(names) + 1


def list_distributions(names: list[str]) -> dict[str, metadata.Distribution]:
    """The installed packages of these names and all that they need, by their normalised names."""
    distributions: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system
        required = [line for line in distributions[name].requires or [] if "extra ==" not in line]
        pending += [re.split(r"[^\w.-]", line)[0] for line in required]
    return distributions


def build_bare_python(folder: Path, distributions: list[metadata.Distribution]) -> Path:
    """A Python that has these packages and no others, by links to them."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in distributions:
        for file in distribution.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python3"


def pack_wheel(distribution: metadata.Distribution, folder: Path) -> None:
    """Of an installed package; of this project, which is installed from here, what names it."""
    with zipfile.ZipFile(folder / f"{distribution.name}.whl", "w") as wheel:
        for file in distribution.files or []:
            is_code = ".." not in file.parts and file.suffix not in (".pyc", ".pth")
            if is_code and file.parts[0] != "vit":
                wheel.write(Path(str(distribution.locate_file(file))), str(file))


@pytest.mark.extended
def test_the_three_commands_of_the_page_run_on_a_bare_machine(tmp_path: Path) -> None:
    """Without network, pip or git, and with no packages but those that `make wheels` expects there;
    with small models on the CPU."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    commands = re.findall(r"^python3 (benchmarks/gpu\.py --call .*)$", page, re.MULTILINE)
    assert len(commands) == 3
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    match = re.search(r"^WHEELS := (.*)$", makefile, re.MULTILINE)
    assert match is not None

    distributions = list_distributions(["vit-pipeline", "pytest", "beartype"])
    brought = {"vit-pipeline", *match[1].split()}
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in brought:
        pack_wheel(distributions.pop(name), wheels)
    (wheels / gpu.COMMIT_FILE).write_text("abc123\n")
    python = build_bare_python(tmp_path / "bare", list(distributions.values()))
    places = {
        "CIFAR10": str(gpu.prepare_images(None, tmp_path)),
        "wheels": str(wheels),
        "results": str(tmp_path / "results"),
    }
    environment = {
        "PATH": str(python.parent),
        "HOME": str(tmp_path),
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    for command in commands:
        arguments = [places.get(word, word) for word in shlex.split(command)]
        done = subprocess.run(
            [str(python), *arguments, "--device", "cpu", "--small"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "not installed" not in done.stdout
        print(done.stdout)

    result = read_result(tmp_path / "results", gpu.NAME)
    assert result["machine"]["commit"] == "abc123"
    names = [part.name for part in gpu.list_parts(make_options(), Path("images"))]
    ended = {name: part["ended"] for name, part in result["parts"].items()}
    assert ended == dict.fromkeys(names, "passed"), result
