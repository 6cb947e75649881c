"""Bad input in large numbers: `make fuzz`, or `python -m tests.fuzz.fuzzer --cases 20000`.

Each case damages a real file (an image, a model file, a checkpoint, an archive of images, a cache,
a data set, a result), or puts odd values into a configuration, a checkpoint or metadata, and
gives it to what reads such files. Others send damaged requests to `vit serve`, make layouts of
folders at random, export a model into a folder in which an export was broken off, and compare
evaluations of random results. What may happen: success with finite results, or ValueError or
OSError with one sentence (exit code 2). A case fails with any other exception, after 20 seconds,
with a process started, or where it took more than 2 GiB.
"""

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.damage import (
    OVERRIDES,
    Forbidden,
    change_value,
    damage_text,
    mutate,
    refusals,
    run_command,
)

os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS, MEBIBYTES = 20, 2048
PROCESSES = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn")
Case = Callable[[random.Random, Path], None]


class Corpus:
    """Real files to damage, made once in a directory."""

    def __init__(self, directory: Path) -> None:
        import datasets
        import numpy as np
        from PIL import Image

        from tests.conftest import TINY_RUN, Launcher
        from tests.evaluation.records import write_evaluation

        os.environ["VIT_CACHE"] = str(directory / "cache")
        self.directory, self.run = directory, directory / "run"
        empty = directory / "empty.yaml"
        empty.touch()
        tiny, self.other = (
            [*TINY_RUN, "train.epochs=1", "optimizer.name=adamw"],
            directory / "other",
        )
        Launcher().succeed("train", empty, *tiny, "--output", self.run)
        Launcher().succeed("train", empty, *tiny, "train.seed=1", "--output", self.other)
        self.model, self.config = self.run / "model.safetensors", self.run / "config.yaml"
        (self.checkpoint,) = (self.run / "checkpoints").glob("step-*.pt")
        pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
        picture, self.images = Image.fromarray(pixels), list[Path]()
        for name in [
            "avif",
            "bmp",
            "gif",
            "jpg",
            "png",
            "ppm",
            "tif",
            "webp",
            "dds",
            "eps",
            "sgi",
            "tga",
            "pcx",
            "ico",
        ]:
            picture.save(directory / f"image.{name}")
            self.images.append(directory / f"image.{name}")
        Image.fromarray(pixels[..., 0].astype(np.uint16)).save(directory / "deep.png")
        picture.convert("P").save(directory / "palette.png", transparency=3)
        self.images += [directory / "deep.png", directory / "palette.png"]
        self.shard = directory / "shard.tar"
        with tarfile.open(self.shard, "w") as tar:
            for number in range(4):
                tar.add(directory / "image.png", f"{number}.png")
                member = tarfile.TarInfo(f"{number}.cls")
                member.size = 1
                tar.addfile(member, io.BytesIO(str(number % 2).encode()))
        self.parquet = directory / "train.parquet"
        encoded = {"bytes": (directory / "image.png").read_bytes(), "path": None}
        rows = {"image": [encoded] * 2, "label": [0, 1]}
        features = datasets.Features(
            image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"])
        )
        datasets.disable_progress_bars()
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(self.parquet)
        self.saved = directory / "saved"
        datasets.DatasetDict(train=table, test=table).save_to_disk(self.saved)
        self.evaluations = [
            write_evaluation(directory, name, np.zeros(8, dtype=np.int64)) for name in ("a", "b")
        ]


def build_cases(corpus: Corpus) -> dict[str, Case]:
    """What is fuzzed, by name."""
    import numpy as np
    import torch

    from tests.fuzz.data_cases import build_data_cases
    from vit.bundle import load_bundle
    from vit.config import load_config
    from vit.data.cache import decode_dataset
    from vit.data.images import read_image
    from vit.data.open import open_dataset
    from vit.model.model_file import compute_checksum
    from vit.training.run import build_run

    def damage(path: Path, folder: Path, rng: random.Random) -> Path:
        target = folder / path.name
        target.write_bytes(mutate(path.read_bytes(), rng))
        return target

    def image(rng: random.Random, folder: Path) -> None:
        path = damage(rng.choice(corpus.images), folder, rng)
        with refusals():
            path = path.rename(folder / rng.choice(("x.jpg", path.name)))
            assert read_image(path).mode == "RGB"

    def predict(rng: random.Random, folder: Path) -> None:
        path = damage(rng.choice(corpus.images), folder, rng)
        out = run_command("predict", corpus.model, path, may_fail=True)
        for line in (out or "").splitlines():
            for found in json.loads(line).get("predictions", []):
                assert math.isfinite(found["probability"])

    def model(rng: random.Random, folder: Path) -> None:
        path = damage(corpus.model, folder, rng)
        with refusals():
            bundle, expected = load_bundle(path), load_bundle(corpus.model)
            weights, right = bundle.model.state_dict(), expected.model.state_dict()
            assert all(torch.equal(weights[name], right[name]) for name in right), (
                "damage loaded without a word"
            )
            assert bundle.metadata == expected.metadata

    def metadata(rng: random.Random, folder: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        with safe_open(corpus.model, framework="pt") as file:
            values = json.loads(file.metadata()["vit"])
        for _ in range(rng.choice((1, 1, 3))):
            change_value(values, rng)
        tensors = load_file(corpus.model)
        values.pop("content_sha256", None)
        values["content_sha256"] = compute_checksum(tensors, values)
        path = folder / "model.safetensors"
        save_file(tensors, path, metadata={"vit": json.dumps(values)})
        if run_command("info", path):
            for line in (
                run_command("predict", path, corpus.images[4], "--device", "cpu") or ""
            ).splitlines():
                for found in json.loads(line).get("predictions", []):
                    assert math.isfinite(found["probability"])

    def checkpoint(rng: random.Random, folder: Path) -> None:
        run = folder / "run"
        shutil.copytree(corpus.run / "checkpoints", run / "checkpoints")
        path = run / "checkpoints" / corpus.checkpoint.name
        path.write_bytes(mutate(path.read_bytes(), rng))
        with refusals(), contextlib.redirect_stderr(io.StringIO()):
            config = load_config(corpus.config)
            trainer = build_run(config, directory=run, device_name="cpu", observers=[]).trainer
            trainer.resume()

    def configuration(rng: random.Random, folder: Path) -> None:
        path = damage(corpus.config, folder, rng)
        with refusals():
            load_config(path, [rng.choice(OVERRIDES)] if rng.random() < 0.5 else ())

    def drawn_configuration(rng: random.Random, folder: Path) -> None:
        values = load_config(corpus.config).model_dump(mode="json")
        for _ in range(rng.choice((1, 2))):
            change_value(values, rng)
        with refusals():
            load_config(values)

    def archive(rng: random.Random, folder: Path) -> None:
        path = damage(corpus.shard, folder, rng)
        with refusals():
            source = open_dataset("webdataset", root=path).split("all")
            for index in range(min(len(source), 4)):
                with refusals():
                    source.image(index)

    def cache(rng: random.Random, folder: Path) -> None:
        source = open_dataset("digits").split("validation")
        options: dict[str, Any] = {"size": (8, 8), "cache_dir": folder, "progress": False}
        expected = decode_dataset(source, **options)
        pixels = np.array(expected.pixels)  # a map of a file that is cut off may not be read
        (built,) = (entry for entry in folder.iterdir() if entry.is_dir())
        name = rng.choice(("index.npz", "images.u8"))
        (built / name).write_bytes(mutate((built / name).read_bytes(), rng))
        again = decode_dataset(source, **options)
        assert again.pixels is not None
        assert np.array_equal(again.pixels, pixels)
        assert again.fingerprint == expected.fingerprint

    def evaluation(rng: random.Random, folder: Path) -> None:
        shutil.copytree(corpus.evaluations[1], folder / "b")
        damage_text(folder / "b" / rng.choice(("evaluation.json", "predictions.npz")), rng)
        run_command("compare", corpus.evaluations[0], folder / "b")

    def table(rng: random.Random, folder: Path) -> None:
        for name in ("a.png", "b.png"):
            shutil.copy(corpus.images[4], folder / name)
        path = folder / rng.choice(("labels.csv", "metadata.csv", "metadata.jsonl"))
        rows = [
            {"file_name": "a.png", "label": "cat", "split": "train"},
            {"path": "b.png", "class": 1},
        ]
        content = b"path,label,split\na.png,cat,train\nb.png,dog,test\n"
        if path.suffix == ".jsonl":
            for _ in range(rng.randrange(2)):
                change_value(rows, rng)
            content = "\n".join(map(json.dumps, rows)).encode()
        path.write_bytes(
            mutate(content, rng) if path.suffix == ".csv" or rng.random() < 0.5 else content
        )
        with refusals():
            assert len(open_dataset("folder", root=folder).split("all")) > 0

    def parquet(rng: random.Random, folder: Path) -> None:
        path = damage(corpus.parquet, folder, rng)
        with refusals():
            source = open_dataset("huggingface", root=path, cache_dir=folder / "cache").split("all")
            for index in range(len(source)):
                with refusals():
                    source.image(index)

    def class_names(rng: random.Random, folder: Path) -> None:
        shutil.copy(corpus.shard, folder)
        (folder / "words.txt").write_bytes(
            mutate(b"n01440764 tench, Tinca tinca\n0\tcat\n1: dog\n", rng)
        )
        words = folder / "words.txt" if rng.random() < 0.5 else None
        with refusals():
            assert (
                len(
                    open_dataset("webdataset", root=folder, class_names=words)
                    .split("all")
                    .class_names
                )
                > 1
            )

    def pattern(rng: random.Random, folder: Path) -> None:
        parts = [
            "{0..9}",
            "{00..99999999}",
            "{a,b}",
            "{",
            "}",
            "..",
            ",",
            "pi",
            "::",
            "shard",
            ".tar",
            "*",
            "$",
        ]
        text = "".join(rng.choices(parts, k=rng.randrange(1, 9)))
        (folder / "c.yaml").write_text(json.dumps({"data": {"name": "webdataset", "root": text}}))
        run_command("train", folder / "c.yaml", "--dry-run", "--output", folder / "run")

    serving: list[Any] = []

    def serve(rng: random.Random, folder: Path) -> None:
        """A form with a photo, damaged in the photo or around it."""
        from fastapi.testclient import TestClient

        from vit.deploy.serve.app import build_app

        # built once: it is the requests that are odd
        if not serving:
            app = build_app(load_bundle(corpus.model), hosts=["testserver"])
            serving.append(TestClient(app))
        photo = rng.choice(corpus.images).read_bytes()
        if rng.random() < 0.7:
            photo = mutate(photo, rng)
        head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        body = head + photo + b"\r\n--x--\r\n"
        if rng.random() < 0.3:
            body = mutate(body, rng)
        form = "multipart/form-data; boundary=x"
        kind = rng.choice((form,) * 6 + ("multipart/form-data", "x", "image/jpeg"))
        query = rng.choice(("", "?top_k=2", "?top_k=0", "?map=true", "?map=x"))
        headers = {"Content-Type": kind}
        answer = serving[0].post(f"/predict{query}", content=body, headers=headers)
        assert answer.status_code in (200, 400, 413, 422), answer.status_code
        if answer.status_code == 200:
            assert all(math.isfinite(row["probability"]) for row in answer.json()["classes"])
        else:
            assert 0 < len(answer.text) < 3000, answer.text
            assert " at 0x" not in answer.text

    def layout(rng: random.Random, folder: Path) -> None:
        """Folders of images with names that mean something, or look as if they did."""
        names = ("train", "Train", "val", "dev", "test", "cat", "dog", "cat ", "é", "e\u0301", ".x")
        for _ in range(rng.randrange(2, 12)):
            parts = rng.choices(names, k=rng.randrange(1, 4))
            place = folder / "images" / Path(*parts)
            place.mkdir(parents=True, exist_ok=True)
            for number in range(rng.randrange(4)):
                suffix = rng.choice((".png",) * 6 + (".heic", ".txt", ""))
                shutil.copy(corpus.images[4], place / f"{number}{suffix}")
        visible = [
            path
            for path in (folder / "images").rglob("*.png")
            if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        ]
        with refusals():
            splits = open_dataset("folder", root=folder / "images", cache_dir=folder / "cache")
            images = splits.split("all")
            # no image is lost in silence
            told = " ".join(splits.images.listing.read)
            unused = map(int, re.findall(r"images in .*?/ itself (\d+)", told))
            assert len(visible) == len(images) + sum(unused), (told, visible)
            assert len(set(images.ids)) == len(images)

    def export(rng: random.Random, folder: Path) -> None:
        """A damaged model, into a folder in which an export was broken off or other files are."""
        source = corpus.model
        if rng.random() < 0.5:
            source = damage(corpus.model, folder, rng)
        output = folder / "out"
        kind = rng.choice(("timm", "huggingface"))
        earlier = rng.randrange(4)
        if earlier:
            output.mkdir()
            (output / f".model.safetensors.{rng.randrange(16**8):08x}.tmp").write_bytes(b"half")
        if earlier > 1:
            (output / ".vit-output").touch()
        if earlier > 2:
            (output / "config.json").write_text("{}")
        overwrite = rng.random() < 0.5
        command = ["export", source, "--format", kind, "--output", output]
        told = run_command(*command, *(["--overwrite"] if overwrite else []))
        if told is not None:
            assert not list(output.glob(".*.tmp"))
            assert json.loads((output / "config.json").read_text())[
                "architectures" if kind == "huggingface" else "architecture"
            ]
        if earlier == 1 or (earlier == 3 and not overwrite):
            assert told is None

    def comparison(rng: random.Random, folder: Path) -> None:
        """Evaluations with results at random."""
        from tests.evaluation.records import write_evaluation

        num_images = rng.choice((1, 2, 8, 50))
        places = []
        for number in range(rng.randrange(2, 6)):
            share = rng.choice((0.0, 0.5, 0.9, 1.0))
            ranks = [0 if rng.random() < share else 1 for _ in range(num_images)]
            name = f"evaluation-{number}"
            places.append(write_evaluation(folder, name, np.array(ranks)))
        output = folder / "out"
        told = run_command("compare", *places, "--output", output)
        assert told is not None
        assert "nan" not in told.lower()
        for pair in json.loads((output / "comparison.json").read_text())["pairs"]:
            low, high = pair["interval"]
            assert -1 <= low <= pair["difference"] <= high <= 1
            assert 0 <= pair["p_value"] <= 1
            assert pair["is_significant"] == (pair["p_value"] < 0.05)
            assert pair["is_significant"] or low <= 0 <= high

    def run(rng: random.Random, folder: Path) -> None:
        """What is in the directory of a run that has ended is damaged, or another run's."""
        shutil.copytree(corpus.run, folder / "run")
        place = rng.choice(("config.yaml", "model.safetensors", "checkpoints/step-*.pt"))
        (path,), (others,) = (folder / "run").glob(place), corpus.other.glob(place)
        if rng.random() < 0.2:
            path.unlink()
            shutil.copy(others, path.parent)
        elif path.name == "config.yaml" and rng.random() < 0.5:
            values = load_config(path).model_dump(mode="json")
            change_value(values, rng)
            path.write_text(json.dumps(values))
        else:
            path.write_bytes(mutate(path.read_bytes(), rng))
        if run_command("train", "--resume", "--output", folder / "run") is not None:
            assert (
                folder / "run" / "model.safetensors"
            ).read_bytes() == corpus.model.read_bytes(), "another model"

    first = (
        image,
        predict,
        model,
        metadata,
        checkpoint,
        configuration,
        drawn_configuration,
        archive,
    )
    second = (cache, evaluation, table, parquet, class_names, pattern, run)
    cases = (*first, *second, serve, layout, export, comparison)
    return {case.__name__: case for case in cases} | build_data_cases(corpus)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    started, busy = time.monotonic(), time.process_time()

    def stop(*_: object) -> None:
        # on a machine that does other work, seconds of this process count, up to ten times as many
        waited = time.monotonic() - started < 10 * SECONDS
        if waited and 0.1 < time.process_time() - busy < SECONDS / 2:
            signal.alarm(SECONDS)
            return
        raise Forbidden(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_active = False


def _audit(event: str, _: object) -> None:
    if _active and event in PROCESSES:
        raise Forbidden(f"{event}: a program was started")


@dataclass
class Tally:
    """What became of the cases of one kind."""

    cases: int = 0
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    largest_mib: int = 0
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        slowest, largest = (
            max(self.slowest_seconds, other.slowest_seconds),
            max(self.largest_mib, other.largest_mib),
        )
        failures = self.failures + other.failures
        return Tally(
            self.cases + other.cases, self.seconds + other.seconds, slowest, largest, failures
        )


def measure_memory() -> int:
    """MiB that this process has at most held since it was last asked."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    with contextlib.suppress(OSError):  # where it isn't allowed, the most since the process began
        Path("/proc/self/clear_refs").write_text("5")
    return int(found[1]) // 1024 if found else 0


def fuzz(
    count: int,
    *,
    seed: int,
    seconds: float = math.inf,
    keep: Path | None = None,
    kinds: str = "",
) -> dict[str, Tally]:
    """Run `count` cases, or as many as take `seconds`; of each kind what became of them. A failure
    has the number with which it is repeated: `--cases 1 --seed NUMBER`, and its `--kinds`."""
    global _active
    sys.addaudithook(_audit)
    tallies, started = dict[str, Tally](), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        chosen = kinds.split(",")
        cases = [
            (name, case)
            for name, case in build_cases(Corpus(Path(directory))).items()
            if not kinds or name in chosen
        ]
        measure_memory()
        for number in range(seed, seed + count):
            if time.monotonic() - started > seconds:
                break
            name, case = cases[number % len(cases)]
            folder, began, failures = Path(directory) / "case", time.monotonic(), list[str]()
            folder.mkdir()
            if keep is not None:  # a crash of the process leaves its number
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"running-{seed}").write_text(f"{number} {name}")
            try:
                _active = True
                with limits():
                    case(random.Random(number), folder)
            except (Exception, Forbidden, SystemExit) as error:
                failures.append(
                    f"case {number}, {name}: {type(error).__name__}: {str(error)[:300]}"
                )
                if keep is not None:
                    shutil.copytree(folder, keep / f"{number}-{name}", dirs_exist_ok=True)
            finally:
                _active = False
            took, largest = time.monotonic() - began, measure_memory()
            if largest > MEBIBYTES:
                failures.append(f"case {number}, {name}: {largest:,} MiB")
            tallies[name] = tallies.get(name, Tally()) + Tally(1, took, took, largest, failures)
            shutil.rmtree(folder)
    return tallies


def _fuzz_part(arguments: tuple[int, int, float, Path | None, str]) -> dict[str, Tally]:
    count, seed, seconds, keep, kinds = arguments
    return fuzz(count, seed=seed, seconds=seconds, keep=keep, kinds=kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bad input in large numbers.")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1200, help="at most; fewer cases then")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", default="", help="those alone, such as serve,layout")
    parser.add_argument("--keep", type=Path, help="where the files of failing cases go")
    parser.add_argument(
        "--output", type=Path, help="folder for fuzz-MACHINE.json, such as benchmarks/results"
    )
    chosen = parser.parse_args()
    started, count = time.monotonic(), -(-chosen.cases // chosen.processes)
    parts = [
        (count, chosen.seed + rank * count, chosen.seconds, chosen.keep, chosen.kinds)
        for rank in range(chosen.processes)
    ]
    tallies = dict[str, Tally]()
    with ProcessPoolExecutor(
        chosen.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for part in pool.map(_fuzz_part, parts):  # a process that crashes is BrokenProcessPool
            tallies |= {name: tallies.get(name, Tally()) + tally for name, tally in part.items()}
    total, seconds = sum(tallies.values(), Tally()), time.monotonic() - started
    for name, tally in tallies.items():
        each, most = (
            f"{tally.seconds / tally.cases:6.3f} s each",
            f"{tally.slowest_seconds:5.1f} s at most",
        )
        figures = (
            f"{each}, {most}, {tally.largest_mib:5} MiB at most, failures: {len(tally.failures)}"
        )
        print(f"{name:20} {tally.cases:6} cases, {figures}")
    print(*total.failures, sep="\n")
    print(
        f"{total.cases} cases in {seconds:.0f} s, {total.largest_mib} MiB at most, failures: {len(total.failures)}"
    )
    if chosen.output:
        from benchmarks.conditions import describe_conditions, write_result

        result = {
            "machine": describe_conditions("cpu"),
            "processes": chosen.processes,
            "seconds": round(seconds),
        }
        result |= {
            "total": asdict(total),
            "kinds": {name: asdict(tally) for name, tally in tallies.items()},
        }
        print(write_result(chosen.output, "fuzz", result))
    sys.exit(bool(total.failures))


if __name__ == "__main__":
    main()
