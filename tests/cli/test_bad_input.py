"""Damaged files, hostile files and typing errors: the command ends soon, in little memory, with one line
and exit code 2, or with the right result. Never with a traceback or silently with a wrong result."""

import io
import json
import os
import shutil
import signal
import struct
import sys
import tarfile
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vit
from tests.conftest import TINY_RUN, Launcher, SaveModel
from tests.evaluation.records import write_evaluation
from vit.bundle import load_bundle
from vit.config import load_config
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.images import list_images, read_image
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.evaluation.predictions import COLUMNS
from vit.model.model_file import compute_checksum
from vit.model.weights import read_weights
from vit.runtime.device import choose_device


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return save_model(path, class_names=("ant", "bee", "cow"), config={"data": {"name": "digits"}})


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture(autouse=True)
def within_a_minute() -> Any:
    """A hang fails the test instead of stopping the suite."""

    def stop(*_: object) -> None:
        raise TimeoutError("this took more than a minute")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def change_metadata(path: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return the model file with other metadata and their checksum, as an attacker would write it."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["vit"])
    change(metadata)
    metadata.pop("content_sha256", None)
    metadata["content_sha256"] = compute_checksum(tensors, metadata)
    save_file(tensors, target, metadata={"vit": json.dumps(metadata)})
    return target


def set_value(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    *sections, key = place.split(".")

    def change(metadata: dict[str, Any]) -> None:
        for section in sections:
            metadata = metadata[section]
        metadata[key] = value

    return change


class TestImages:
    def test_a_format_that_starts_programs_is_not_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[object] = []
        monkeypatch.setattr(
            "PIL.EpsImagePlugin.Ghostscript", lambda *arguments, **_: started.append(arguments)
        )
        script = (
            "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
        )
        (tmp_path / "x.jpg").write_text(script)
        with pytest.raises(
            ValueError, match=r"x\.jpg can't be read as an image: it is not one of AVIF, BMP"
        ):
            read_image(tmp_path / "x.jpg")
        assert started == []

    @pytest.mark.parametrize("command", ["predict", "attention"])
    def test_a_pipe_is_no_image(
        self, cli: Launcher, model_file: Path, tmp_path: Path, command: str
    ) -> None:
        os.mkfifo(tmp_path / "pipe.jpg")
        output = ["--output", tmp_path / "maps"] if command == "attention" else []
        outcome = cli.run(command, model_file, tmp_path / "pipe.jpg", "--device", "cpu", *output)
        assert "not a regular file" in outcome.out + outcome.err
        assert outcome.code == (2 if output else 1)

    def test_damaged_files_of_odd_formats_are_rows_and_not_the_end(
        self, cli: Launcher, model_file: Path, photo: Path, tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        heads = {
            "dds": b"DDS " + struct.pack("<I", 124),
            "blp": b"BLP2\x01\0\0\0",
            "spi": struct.pack(">27f", *[1.0] * 27),
        }
        names = []
        for name, head in heads.items():
            names.append(tmp_path / f"{name}.png")
            names[-1].write_bytes(head + rng.bytes(2000))
        Image.open(photo).save(tmp_path / "whole.avif")
        whole = (tmp_path / "whole.avif").read_bytes()
        for place in range(8, len(whole), max(len(whole) // 40, 1)):
            names.append(tmp_path / f"{place}.avif")
            names[-1].write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        outcome = cli.succeed("predict", model_file, *names, photo, "--device", "cpu")
        assert len(outcome.out.splitlines()) == len(names) + 1

    def test_a_name_that_no_file_can_have_is_a_row(
        self, cli: Launcher, model_file: Path, photo: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listed = f"{photo}\n{'x' * 300}\n{photo}\n"
        monkeypatch.setattr(sys, "stdin", io.StringIO(listed))
        lines = cli.succeed("predict", model_file, "-", "--device", "cpu").out.splitlines()
        assert ["error" in json.loads(line) for line in lines] == [False, True, False]

    def test_no_message_has_an_address(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
        for file in (tmp_path / "x.png", io.BytesIO(b"nothing")):
            with pytest.raises(ValueError, match="can't be read") as caught:
                read_image(file)
            assert "0x" not in str(caught.value)

    def test_wide_16_bit_images_take_memory_for_their_pixels_only(
        self, cli: Launcher, tmp_path: Path
    ) -> None:
        """7,000×7,000 pixels of two bytes: 98 MB, and 147 MB as RGB; their int64 copies took 1.2
        GB."""
        width = 7000
        row = zlib.compressobj(9)
        content = (
            b"".join(row.compress(b"\0" + b"\x12\x34" * width) for _ in range(width)) + row.flush()
        )

        def chunk(kind: bytes, data: bytes) -> bytes:
            return (
                struct.pack(">I", len(data))
                + kind
                + data
                + struct.pack(">I", zlib.crc32(kind + data))
            )

        head = struct.pack(">IIBBBBB", width, width, 16, 0, 0, 0, 0)
        path = tmp_path / "wide.png"
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", head)
            + chunk(b"IDAT", content)
            + chunk(b"IEND", b"")
        )
        code = (
            "import re, sys; from pathlib import Path; from vit.data.images import read_image;"
            "print(read_image(Path(sys.argv[1])).getpixel((5, 5)));"
            # the resource module's peak is the parent's, too
            "status = Path('/proc/self/status').read_text();"
            "print(int(re.search('VmHWM: *(.*) kB', status.replace('\\t', ' '))[1]) // 1024)"
        )
        pixel, megabytes = cli.finish(cli.start(path, program=("-c", code))).out.splitlines()
        assert pixel == "(18, 18, 18)"
        assert int(megabytes) < 700

    @pytest.mark.extended
    def test_eight_large_images_at_once_take_the_memory_of_two(
        self, cli: Launcher, tmp_path: Path
    ) -> None:
        """Pillow needs 4 bytes for a pixel: eight images of 60 megapixels would take 1.8 GiB."""
        Image.new("RGB", (10_000, 6_000), "red").save(tmp_path / "large.png", compress_level=1)
        code = (
            "import re, sys; from concurrent.futures import ThreadPoolExecutor;"
            "from pathlib import Path; from vit.data.images import read_image;"
            "path = Path(sys.argv[1]);"
            "pool = ThreadPoolExecutor(8);"
            # let go at once: how long a busy machine takes to shrink one would be measured, too
            "reads = [pool.submit(lambda: read_image(path).getpixel((5, 5))) for _ in range(8)];"
            "print({read.result() == (255, 0, 0) for read in reads} == {True});"
            # the resource module's peak is the parent's, too
            "status = Path('/proc/self/status').read_text();"
            "print(int(re.search('VmHWM: *(.*) kB', status.replace('\\t', ' '))[1]) // 1024)"
        )
        arguments = (tmp_path / "large.png",)
        equal, megabytes = cli.finish(cli.start(*arguments, program=("-c", code))).out.split()
        assert equal == "True"
        assert int(megabytes) < 700

    def test_threads_decode_large_images_one_at_a_time(
        self, photo: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from threading import Lock

        from vit.data import images

        monkeypatch.setattr(images, "_LARGE_PIXELS", 500)  # a photo has 600
        lock, inside, most, decode = Lock(), 0, 0, images._decode

        def decode_slowly(image: Image.Image) -> Image.Image:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            sleep(0.01)
            with lock:
                inside -= 1
            return decode(image)

        monkeypatch.setattr(images, "_decode", decode_slowly)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: read_image(photo), range(16)))
        assert most == 1

    def test_a_process_forked_while_a_large_image_is_decoded_reads_large_images(
        self, photo: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from multiprocessing import get_context

        from vit.data import images

        monkeypatch.setattr(images, "_LARGE_PIXELS", 500)  # a photo has 600
        with images._large_image_lock:
            process = get_context("fork").Process(target=read_image, args=(photo,))
            process.start()
            process.join(timeout=60)
        assert process.exitcode == 0

    def test_images_that_are_measured_are_held_at_the_models_size(
        self, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vit.analysis.faithfulness.measure import select_correct_images

        last: list[weakref.ref[Image.Image]] = []

        @dataclass(frozen=True)
        class Reader:
            def image(self, index: int) -> Image.Image:
                assert all(image() is None for image in last[:-1]), "images are still held"
                image = Image.new("RGB", (400, 300), (index, 0, 0))
                last.append(weakref.ref(image))
                return image

        black = np.zeros((300, 400, 3), dtype=np.uint8)
        predicted = vit.predict(model_file, black).predictions[0].classes[0][0]
        labels = np.full(12, (predicted + 1) % 3)
        names, ids = ("ant", "bee", "cow"), [str(number) for number in range(12)]
        source = ImageDataset(name="x", class_names=names, labels=labels, ids=ids, reader=Reader())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="0 of 12 images are predicted correctly"):
            select_correct_images(load_bundle(model_file), source, count=12, batch_size=6)

    @pytest.mark.parametrize("command", ["predict", "attention"])
    def test_a_folder_without_images_or_that_cannot_be_read_is_a_row_of_a_list(
        self,
        cli: Launcher,
        model_file: Path,
        photo: Path,
        tmp_path: Path,
        command: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("empty", "secret"):
            (tmp_path / name).mkdir()
        scan = os.scandir

        def scandir(path: Any) -> Any:
            if "secret" in os.fspath(path):
                raise PermissionError(13, "Permission denied", path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", scandir)
        listed = [tmp_path / "empty", photo, tmp_path / "secret"]
        output = ["--output", tmp_path / "maps", "--no-checks"] if command == "attention" else []
        out = cli.succeed(command, model_file, *listed, "--device", "cpu", *output).out
        assert out.count("is a folder that holds no images, or can't be read") == 2
        if output:
            assert (tmp_path / "maps" / "photo.rollout.png").is_file()
        else:
            assert ["error" in json.loads(line) for line in out.splitlines()] == [True, False, True]

    def test_attention_holds_no_more_pixels_than_fit(
        self, cli: Launcher, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vit.explanation import explainer
        from vit.explanation.records import ImageResult

        rng = np.random.default_rng(0)
        (tmp_path / "photos").mkdir()
        for number in range(6):
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(
                tmp_path / "photos" / f"{number}.png"
            )
        command = [
            "attention",
            model_file,
            tmp_path / "photos",
            "--device",
            "cpu",
            "--format",
            "png,npz,html",
        ]
        cli.succeed(*command, "--no-checks", "--output", tmp_path / "whole")
        monkeypatch.setattr(explainer, "_MAX_KEPT_PIXELS", 6 * 600 - 1)  # the pixels of six photos
        kept, read_image = [], ImageResult.read_image
        monkeypatch.setattr(
            ImageResult,
            "read_image",
            lambda explained: kept.append(explained.image is not None) or read_image(explained),
        )
        cli.succeed(*command, "--no-checks", "--output", tmp_path / "small")
        assert not any(kept)
        assert len(kept) >= 6
        names = sorted(path.name for path in (tmp_path / "whole").iterdir())
        for name in names:  # the same bytes, though all were decoded twice
            assert (tmp_path / "small" / name).read_bytes() == (
                tmp_path / "whole" / name
            ).read_bytes(), name


class TestConfigurations:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: &a [1, 2]\ndata: {classes: [*a, *a]}", "anchors, aliases and tags"),
            ("x: &x {a: 1}\ndata:\n  <<: [*x, *x]", "anchors, aliases and tags"),
            ("train: {seed: 1, seed: 2}", "the key seed occurs twice"),
            ("train: {seed: !!timestamp x}", "anchors, aliases and tags"),
            ("train: {seed: !!python/name:os.system x}", "anchors, aliases and tags"),
            ("train: {seed: 2001-13-45}", "not valid YAML"),
            ("train: {seed: " + "9" * 5000 + "}", "not valid YAML"),
            ("train: {seed: " + "[" * 2000 + "]" * 2000 + "}", "not valid YAML"),
            ("x: " + "a" * 2**21, "at most"),
        ],
        ids=["alias", "merge", "twice", "timestamp", "python", "date", "digits", "depth", "long"],
    )
    def test_odd_yaml_is_one_line(
        self, cli: Launcher, tmp_path: Path, text: str, message: str
    ) -> None:
        (tmp_path / "c.yaml").write_text(text)
        assert message in cli.fail("train", tmp_path / "c.yaml", "--output", tmp_path / "run")

    def test_an_alias_bomb_ends_at_once(self, tmp_path: Path) -> None:
        lines = [
            "a0: &a0 [x, x]",
            *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)),
        ]
        (tmp_path / "c.yaml").write_text("\n".join(lines) + "\ndata: {classes: *a29}")
        with pytest.raises(ValueError, match="anchors, aliases and tags"):
            load_config(tmp_path / "c.yaml")

    @pytest.mark.parametrize(
        "override",
        [
            "model.patch_size=0",
            "train.seed=!!timestamp x",
            'train.seed=!!int ""',
            "train.seed=!!bool x",
            "train.seed=" + "[" * 3000,
            "data.image_size=1000000000",
            "data.crop_pct=1e-320",
            "data.std=[0, 0, 0]",
            "data.mean=[.nan, 0, 0]",
            "optimizer.lr=.inf",
            "model.embed_dim=1000000000",
            "model.depth=1000000000",
        ],
        ids=lambda text: text[:30],
    )
    @pytest.mark.parametrize("preset", [False, True])
    def test_odd_values_are_one_line(
        self, cli: Launcher, empty_yaml: Path, tmp_path: Path, override: str, preset: bool
    ) -> None:
        more = ["model.preset=vit_nano_patch4_32", "data.image_size=32"] if preset else TINY_RUN
        more = [text for text in more if text.partition("=")[0] != override.partition("=")[0]]
        cli.fail("train", empty_yaml, *more, override, "--dry-run", "--output", tmp_path / "run")

    @pytest.mark.parametrize("name", ["cpu:x", "cuda:x", "cpu:-1", "cpu:9999999999999", "cuda:-1"])
    def test_odd_devices_are_refused(self, cli: Launcher, model_file: Path, name: str) -> None:
        with pytest.raises(ValueError, match="device"):
            choose_device(name)
        cli.fail("predict", model_file, "x.jpg", "--device", name)

    def test_values_of_any_length_are_cut(
        self, cli: Launcher, empty_yaml: Path, tmp_path: Path
    ) -> None:
        long = "x" * 100_000
        for override in (
            f"train.seed={long}",
            f"{long}=1",
            f"train.{long}=1",
            long,
            f"data.name={long}",
        ):
            message = cli.fail("train", empty_yaml, override, "--output", tmp_path / "run")
            assert len(message) < 3000


class TestModelFiles:
    @pytest.mark.parametrize(
        ("place", "value"),
        [
            ("temperature", 0),
            ("temperature", float("nan")),
            ("temperature", "hot"),
            ("preprocess.mean", [float("nan"), 0, 0]),
            ("preprocess.mean", [10**30, 0, 0]),
            ("preprocess.std", [1, 1, 1e-320]),
            ("preprocess.std", [1, 1, 0]),
            ("preprocess.image_size", [10**9, 10**9]),
            ("preprocess.crop_pct", 1e-320),
            ("preprocess.more", 1),
            ("architecture.depth", 10**9),
            ("architecture.depth", "2"),
            ("architecture.embed_dim", 10**9),
            ("architecture.img_size", [10**9, 10**9]),
            ("architecture.img_size", [4096, 4096]),
            ("architecture.mlp", None),
            ("architecture.more", 1),
            ("architecture", []),
            ("class_names", 3),
            ("class_names", ["one"]),
            ("class_names", [{}, {}, {}]),
            ("config", [1]),
            ("config.data", [1]),
            ("config.data", {"name": 5, "classes": 7}),
            ("config.train", {"seed": [1]}),
            ("data", "folder"),
            ("versions", 1),
            ("temperature_fitted_on", [1]),
        ],
        ids=str,
    )
    def test_impossible_metadata_is_refused(
        self,
        cli: Launcher,
        model_file: Path,
        photo: Path,
        tmp_path: Path,
        place: str,
        value: object,
    ) -> None:
        path = change_metadata(model_file, tmp_path / "model.safetensors", set_value(place, value))
        if (place, value) == ("architecture.depth", "2"):  # a number all the same
            assert load_bundle(path).metadata["architecture"]["depth"] == 2
            return
        for command in (["info"], ["predict"]):
            images = [photo, "--device", "cpu"] if command == ["predict"] else []
            cli.fail(*command, path, *images)

    @pytest.mark.parametrize("text", ["[]", "3", '{"schema_version": "x"}', "[" * 100_000])
    def test_metadata_that_is_no_object_is_refused(
        self, cli: Launcher, model_file: Path, tmp_path: Path, text: str
    ) -> None:
        save_file(load_file(model_file), tmp_path / "m.safetensors", metadata={"vit": text})
        cli.fail("info", tmp_path / "m.safetensors")

    def test_a_pipe_is_no_model_file(self, cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.safetensors")
        cli.fail("info", tmp_path / "pipe.safetensors")
        with pytest.raises(OSError, match="not a regular file"):
            read_weights(tmp_path / "pipe.safetensors")
        shutil.copytree(tiny_run, tmp_path / "run")
        for name in ("model.safetensors", ".lock"):
            content = (tmp_path / "run" / name).read_bytes()
            (tmp_path / "run" / name).unlink()
            os.mkfifo(tmp_path / "run" / name)
            if name == ".lock":
                cli.fail("train", "--resume", "--output", tmp_path / "run")
            else:
                assert (
                    "written again"
                    in cli.succeed("train", "--resume", "--output", tmp_path / "run").text
                )
                assert (tmp_path / "run" / name).read_bytes() == content

    def test_every_changed_byte_is_noticed(self, model_file: Path, tmp_path: Path) -> None:
        content, path = model_file.read_bytes(), tmp_path / "m.safetensors"
        rng = np.random.default_rng(0)
        for place in rng.choice(len(content), 150, replace=False).tolist():
            path.write_bytes(
                content[:place]
                + bytes([content[place] ^ (1 << int(rng.integers(8)))])
                + content[place + 1 :]
            )
            with pytest.raises(ValueError, match=r"m\.safetensors"):
                load_bundle(path)

    @pytest.mark.parametrize("name", ["[/]", "[bold]x", "\x1b[2Jx", ":smile:"])
    def test_a_class_name_is_printed_as_it_is(
        self, cli: Launcher, save_model: SaveModel, tmp_path: Path, name: str
    ) -> None:
        path = save_model(
            tmp_path / "[/]" / "m.safetensors", class_names=(name, "b"), data={"[/]": name}
        )
        out = cli.succeed("info", path).out
        assert name.replace("\x1b", "�") in out
        assert "\x1b" not in out


class TestDataSets:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for name in ("cat", "dog"):
            (tmp_path / "images" / name).mkdir(parents=True)
            for number in range(5):
                pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
        return tmp_path / "images"

    def test_a_link_to_its_own_parent_is_refused(self, root: Path) -> None:
        (root / "cat" / "loop").symlink_to("..")
        with pytest.raises(ValueError, match=r"cat/loop leads back to .*; remove the link"):
            open_dataset("folder", root=root).split("all")
        assert len(list(list_images(root))) == 10

    def test_links_that_lead_back_together_are_refused(self, root: Path, tmp_path: Path) -> None:
        """No link leads to its own parent folder, but each image was found 20 times."""
        (tmp_path / "elsewhere").mkdir()
        (root / "cat" / "there").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "back").symlink_to(root)
        with pytest.raises(ValueError, match=r"there/back leads back to .*; remove the link"):
            open_dataset("folder", root=root).split("all")

    @pytest.mark.parametrize("kind", ["a link to nothing", "a link to itself", "a pipe"])
    def test_an_image_that_is_no_file_is_named_and_left_out(
        self, root: Path, tmp_path: Path, kind: str
    ) -> None:
        odd = root / "cat" / "00.png"  # before others of its folder
        if kind == "a pipe":
            os.mkfifo(odd)
        else:
            odd.symlink_to("gone.png" if kind == "a link to nothing" else "00.png")
        source = open_dataset("folder", root=root).split("all")
        decoded = decode_dataset(
            source, size=(8, 8), cache_dir=tmp_path / "cache", max_unreadable_fraction=0.5
        )
        assert [name for name, _ in decoded.unreadable] == ["cat/00.png"]
        assert len(decoded) == 10

    @pytest.mark.parametrize(
        "pattern",
        [
            "{0..999999999999}.tar",
            "{a,b}" * 40 + ".tar",
            "{a..z}" * 9 + ".tar",
            "{{0..999},{0..99999}}{0..99}.tar",
        ],
    )
    def test_a_pattern_of_too_many_shards_is_refused(self, pattern: str) -> None:
        with pytest.raises(ValueError, match="more than 1,000,000"):
            open_dataset("webdataset", root=pattern)

    def test_a_link_to_another_folder_is_followed(self, root: Path, tmp_path: Path) -> None:
        (root / "cat").rename(tmp_path / "elsewhere")
        (root / "cat").symlink_to(tmp_path / "elsewhere")
        assert len(open_dataset("folder", root=root).split("all")) == 10

    def test_folders_nested_1500_deep_are_read(
        self, root: Path, cli: Launcher, model_file: Path
    ) -> None:
        here = os.getcwd()
        try:
            os.chdir(root / "cat")
            for _ in range(1500):
                os.mkdir("d")
                os.chdir("d")
            os.chdir(here)
            assert len(open_dataset("folder", root=root).split("all")) == 10
            assert (
                len(cli.succeed("predict", model_file, root, "--device", "cpu").out.splitlines())
                == 10
            )
        finally:  # Python's own removal recurses too deep for it, and pytest's would fail
            os.chdir(here)
            os.system(f"rm -rf {root}/cat/d")

    def test_a_field_of_200_kilobytes_is_one_line(self, root: Path) -> None:
        (root / "labels.csv").write_text(f"path,label\ncat/0.png,{'x' * 200_000}\n")
        with pytest.raises(ValueError, match=r"labels\.csv line 2"):
            open_dataset("folder", root=root)

    @pytest.mark.parametrize(
        "fault", ["huge label", "5,000 digits", "dangling link", "link to itself", "cut"]
    )
    def test_odd_shards_are_one_error(self, root: Path, tmp_path: Path, fault: str) -> None:
        shard = tmp_path / "shards" / "train.tar"
        shard.parent.mkdir()
        with tarfile.open(shard, "w") as tar:
            for number in range(4):
                tar.add(root / "cat" / f"{number}.png", f"{number}.png")
                member = tarfile.TarInfo(f"{number}.cls")
                text = {"huge label": b"1000000000", "5,000 digits": b"9" * 5000}.get(
                    fault, str(number % 2).encode()
                )
                if fault in ("dangling link", "link to itself"):
                    member.type = tarfile.SYMTYPE
                    member.linkname = "gone" if fault == "dangling link" else member.name
                    text = b""
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
        if fault == "cut":
            shard.write_bytes(shard.read_bytes()[:700])
        expected = r"label|not a complete tar|no images|fewer than two classes"
        with pytest.raises(ValueError, match=expected) as caught:
            open_dataset("webdataset", root=shard.parent).split("all")
        assert len(str(caught.value)) < 500

    def test_measuring_the_normalisation_takes_little_memory(self) -> None:
        import tracemalloc

        from vit.data.statistics import measure_mean_and_std

        images = np.random.default_rng(0).integers(
            0, 256, (200, 128, 128, 3), dtype=np.uint8
        )  # 9.8 MB
        tracemalloc.start()
        mean, std = measure_mean_and_std(images)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2_000_000
        np.testing.assert_allclose(mean, images.mean(axis=(0, 1, 2)) / 255, atol=1e-4)
        np.testing.assert_allclose(std, images.std(axis=(0, 1, 2)) / 255, atol=1e-4)


class TestResults:
    @pytest.fixture
    def maps(self, cli: Launcher, model_file: Path, photo: Path, tmp_path: Path) -> list[object]:
        command = [
            "attention",
            model_file,
            photo,
            "--device",
            "cpu",
            "--no-checks",
            "--output",
            tmp_path / "maps",
        ]
        cli.succeed(*command)
        return [*command, "--resume"]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("maps.npz", b""),
            ("maps.npz", b"PK\x03\x04 nothing"),
            ("manifest.json", b"[]"),
            ("manifest.json", b"[" * 100_000),
        ],
        ids=str,
    )
    def test_a_damaged_export_is_not_continued(
        self, cli: Launcher, maps: list[object], tmp_path: Path, name: str, content: bytes
    ) -> None:
        (tmp_path / "maps" / name).write_bytes(content)
        cli.fail(*maps)

    @pytest.mark.parametrize("key", ["images", "parameters"])
    @pytest.mark.parametrize("value", [None, 3, [3], [{"path": 1}]])
    def test_an_odd_manifest_is_not_continued(
        self, cli: Launcher, maps: list[object], tmp_path: Path, key: str, value: object
    ) -> None:
        path = tmp_path / "maps" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        cli.fail(*maps)

    @pytest.mark.parametrize(
        ("key", "value"), [("method", 10**9), ("sanity_check", {}), ("sink_fraction", "much")]
    )
    def test_an_odd_map_is_not_continued(
        self, cli: Launcher, maps: list[object], tmp_path: Path, key: str, value: object
    ) -> None:
        path = tmp_path / "maps" / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["images"][0]["maps"][0][key] = value
        path.write_text(json.dumps(manifest))
        assert key in cli.fail(*maps)

    @pytest.mark.parametrize("size", [[0.0, 16], [0, 16], [-8, 16], [16], "16"])
    def test_an_odd_size_is_not_drawn(
        self, cli: Launcher, maps: list[object], tmp_path: Path, size: object
    ) -> None:
        path = tmp_path / "maps" / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["images"][0]["size"] = size
        path.write_text(json.dumps(manifest))
        assert "size" in cli.fail(*maps)

    @pytest.mark.parametrize("rank", ["9" * 5000, "x", "", "-1", "1e9"])
    def test_odd_ranks_are_refused(self, cli: Launcher, tmp_path: Path, rank: str) -> None:
        folders = [
            write_evaluation(tmp_path, name, np.zeros(8, dtype=np.int64)) for name in ("a", "b")
        ]
        path = folders[1] / "predictions.csv"
        *lines, last = path.read_text().splitlines()
        cells = last.split(",")
        cells[COLUMNS.index("rank")] = rank
        path.write_text("\n".join([*lines, ",".join(cells)]) + "\n")
        assert "rank" in cli.fail("compare", *folders)

    def test_a_directory_that_looks_like_markup_is_compared(
        self, cli: Launcher, tmp_path: Path
    ) -> None:
        (tmp_path / "[").mkdir()
        folders = [
            write_evaluation(tmp_path / "[", name, np.zeros(8, dtype=np.int64))
            for name in ("]a", "[red]b")
        ]
        assert "[red]b" in cli.succeed("compare", *folders).out


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["predict", "m", "x", "--devise", "cpu"], "--device"),
            (["trian"], "'train'"),
            (["train"], "which configuration?"),
            (["predict", "m", "x", "--top-k", "x"], "--top-k"),
            (["predict", "m", "x", "--format", "xml"], "'table', 'jsonl', 'csv'"),
            (["info", "a", "b"], "b"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_slip_of_the_keyboard_is_one_line_with_the_nearest(
        self, cli: Launcher, arguments: list[str], message: str
    ) -> None:
        assert message in cli.fail(*arguments)

    def test_an_internal_error_is_one_line_with_a_report(
        self, cli: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise KeyError("broken")

        monkeypatch.setattr("vit.bundle.load_bundle", fail)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        outcome = cli.run("info", "imagenette")
        assert outcome.code == 70
        (line,) = outcome.err.splitlines()
        (report,) = tmp_path.glob("vit-report-*.txt")
        assert "internal error, a bug in vit: KeyError: 'broken'; please report it with" in line
        assert str(report) in line
        assert "Traceback" in report.read_text()

    def test_too_little_memory_is_a_user_error(
        self, cli: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise MemoryError

        monkeypatch.setattr("vit.bundle.load_bundle", fail)
        assert "not enough memory" in cli.fail("info", "imagenette")


def test_usage_errors_of_typer_have_a_base_that_main_recognises() -> None:
    """Typer exports no name for it; without it a misspelt option would count as a bug in vit."""
    base = typer.BadParameter.__base__
    assert base is not None
    assert base.__name__ == "UsageError"


def test_the_version_needs_no_command(cli: Launcher) -> None:
    assert cli.succeed("--version").out == f"vit {vit.__version__}\n"
    assert "Missing command" in cli.fail("--")


def test_a_crop_that_needs_too_many_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="at most crop_pct x 16,384"):
        Preprocess((32, 32), crop_pct=1e-320)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "~nobody-here/photos"),
        ("train", "digits", "--init", "~nobody-here/model"),
        ("train", "folder/small", "data.root=~nobody-here/photos"),
        ("evaluate", "imagenette", "--data", "~nobody-here/photos"),
    ],
    ids=["images", "init", "root", "data"],
)
def test_the_home_of_an_unknown_user_is_a_path_that_does_not_exist(
    cli: Launcher, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert "~nobody-here" in cli.fail(*arguments, "--output", tmp_path / "output")
