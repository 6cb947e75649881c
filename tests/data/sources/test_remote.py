"""Shards in object storage are read by range, and give the same images as files do."""

import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath
from PIL import Image

from tests.conftest import TINY_RUN, Launcher
from tests.data.augments import build_loader
from tests.data.sources.test_shards import greys, write_shard
from tests.object_storage import Bucket, ObjectServer, serve_files, serve_s3
from tests.test_docs import COMMANDS
from tests.training.conftest import read_metrics
from tests.training.test_kill import done_steps
from tests.training.test_resume import assert_equal_runs
from vit.data.augment import Augmentation
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.loader import TrainLoader
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.sources import remote, shards
from vit.data.sources.registry import find_kind
from vit.data.sources.remote import RemoteError

SIZES = (30, 25, 35, 30)  # samples of the shards
COUNT = sum(SIZES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    (tmp_path / "objects").mkdir()
    with serve_files(tmp_path / "objects") as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with serve_s3() as client:
        yield client


@pytest.fixture(scope="module")
def bucket(s3: Any, tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    """Four shards: sample n is a picture of the grey n, and its class n % 3."""
    bucket, folder, first = Bucket("shards", s3), tmp_path_factory.mktemp("shards"), 0
    for number, size in enumerate(SIZES):
        shard = write_shard(
            folder / f"{number:03d}.tar", [n % 3 for n in range(first, first + size)], first=first
        )
        bucket.put(shard.name, shard)
        first += size
    return bucket


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)


def write_noise(path: Path) -> int:
    """A shard of COUNT images of 12 kB, the first pixel of sample n being the grey n; its bytes."""
    rng = np.random.default_rng(0)
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(COUNT):
            pixels, buffer = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), io.BytesIO()
            pixels[0, 0] = number
            Image.fromarray(pixels).save(buffer, "PNG")
            writer.write(
                {"__key__": f"s{number:03d}", "png": buffer.getvalue(), "cls": str(number % 3)}
            )
    return path.stat().st_size


def open_all(root: object, **options: Any) -> ImageDataset:
    return open_dataset("webdataset", root=str(root), **options).split("all")


def total_bytes(server: ObjectServer) -> int:
    return sum(end - start for _, start, end in server.read)


# --- what is read -----------------------------


def test_braces_globs_and_folders_of_a_bucket_are_what_local_ones_are(
    bucket: Bucket, s3: Any, tmp_path: Path, empty_cache: Path
) -> None:
    for root in ("{000..003}.tar", "*.tar", ""):
        source = open_all(f"{bucket.url}/{root}")
        assert source.ids[30] == "001.tar/s030"
        assert greys(source) == list(range(COUNT))
        assert source.class_names == ("0", "1", "2")
        assert source.labels.tolist() == [n % 3 for n in range(COUNT)]
        assert greys(pickle.loads(pickle.dumps(source.subset([6, 2])))) == [6, 2]
        assert find_kind(f"{bucket.url}/{root}") == "webdataset"
    splits = Bucket("splits", s3)
    splits.put("birds/train/0.tar", write_shard(tmp_path / "0.tar", ["elk", "owl", "yak"] * 5))
    splits.put("birds/val-0.tar", write_shard(tmp_path / "1.tar", ["yak", "owl"], first=100))
    dataset = open_dataset("webdataset", root="s3://splits/birds/")
    assert greys(dataset.split("test")) == [100, 101]
    assert dataset.split("test").class_names == ("elk", "owl", "yak")
    assert dataset.describe_splits()[0] == "val* is the test split"


@pytest.mark.extended
def test_images_are_read_once_by_range_and_never_a_shard_as_a_whole(
    server: ObjectServer, tmp_path: Path, empty_cache: Path
) -> None:
    write_noise(server.folder / "a.tar")
    dataset = open_all(f"{server.url}/a.tar")
    assert max(end - start for _, start, end in server.read) < 2**16
    server.read.clear()
    few = dataset.subset(np.arange(0, COUNT, 10))
    assert greys(few) == list(range(0, COUNT, 10))
    assert total_bytes(server) == few.reader.sizes().sum()
    server.read.clear()
    dataset.reader.fetch(range(COUNT))
    assert len(server.read) == COUNT - len(few)
    assert greys(dataset) == list(range(COUNT))
    server.read.clear()
    assert greys(open_all(f"{server.url}/a.tar")) == list(range(COUNT))
    assert server.read == []  # the index and the images are on the disk


@pytest.mark.extended
def test_training_reads_each_image_once(
    server: ObjectServer, tmp_path: Path, empty_cache: Path
) -> None:
    for number in range(3):
        write_noise(server.folder / f"{number}.tar")
    dataset = open_all(f"{server.url}/{{0..2}}.tar")
    server.read.clear()
    assert len(list(make_loader(dataset).epoch(0))) == 3 * COUNT // 12
    assert len(set(server.read)) == len(server.read) == 3 * COUNT
    list(make_loader(dataset).epoch(1))
    assert len(server.read) == 3 * COUNT
    # a damaged image is downloaded again
    path = next(empty_cache.glob("remote/*/*-*"))
    content = path.read_bytes()
    path.write_bytes(content[:50] + b"\0" + content[51:])
    list(make_loader(dataset).epoch(2))
    assert len(server.read) == 3 * COUNT + 1
    assert path.read_bytes() == content


@pytest.mark.extended
def test_the_cache_keeps_to_its_size(
    server: ObjectServer, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = write_noise(server.folder / "a.tar") // 5
    monkeypatch.setattr(shards, "_CACHE_BYTES", most)
    dataset = open_all(f"{server.url}/a.tar")
    dataset.reader.fetch(range(COUNT))  # more than is kept: what was deleted is read again
    assert sum(path.stat().st_size for path in empty_cache.glob("remote/*/*-*")) <= most
    assert greys(dataset) == list(range(COUNT))


def test_a_changed_shard_is_another_data_set(server: ObjectServer, empty_cache: Path) -> None:
    write_shard(server.folder / "a.tar", [0, 1, 2])
    first = open_all(f"{server.url}/a.tar")
    write_shard(server.folder / "a.tar", [0, 1, 2], first=3)
    changed = open_all(f"{server.url}/a.tar")
    assert first.cache_key() != changed.cache_key()
    assert greys(changed) == [3, 4, 5]


def replace_shard(folder: Path) -> Path:
    """Other images of the same names and lengths."""
    path = write_shard(folder / "a.tar", [n % 3 for n in range(COUNT)], first=1)
    os.utime(path, (1, 1))
    return path


def test_a_shard_that_is_replaced_during_a_run_is_not_mixed_in(
    server: ObjectServer, empty_cache: Path
) -> None:
    write_shard(server.folder / "a.tar", [n % 3 for n in range(COUNT)])
    dataset = open_all(f"{server.url}/a.tar")
    dataset.image(0)
    replace_shard(server.folder)
    with pytest.raises(
        RemoteError, match=r"a\.tar has changed since its images were listed; start again"
    ):
        dataset.image(1)


def test_an_object_that_is_replaced_during_a_run_is_not_mixed_in(
    s3: Any, tmp_path: Path, empty_cache: Path
) -> None:
    bucket = Bucket("replaced", s3)
    bucket.put("a.tar", write_shard(tmp_path / "a.tar", [n % 3 for n in range(COUNT)]))
    dataset = open_all(f"{bucket.url}/a.tar")
    dataset.image(0)
    bucket.put("a.tar", replace_shard(tmp_path))
    with pytest.raises(
        RemoteError, match=r"a\.tar has changed since its images were listed; start again"
    ):
        dataset.image(1)


def test_tokens_are_in_no_message_and_are_asked_for_again(
    server: ObjectServer, empty_cache: Path, cli: Launcher, tmp_path: Path, quick_retries: None
) -> None:
    root = f"{server.url}/a.tar?token=secret-1&sig=secret-2".replace("//", "//me:secret-3@")
    for options in ([], ["--resume"]):
        message = cli.fail("train", root, "--output", tmp_path / "run", *options)
        assert "a.tar?token=***&sig=***" in message
        assert "secret" not in message
    saved = root.replace("secret-1", "***")
    with pytest.raises(ValueError, match=r"was saved without its token; name the whole address"):
        open_all(saved)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in left if b"secret" in path.read_bytes()]


# --- order, ranks and workers -----------------


def make_loader(dataset: ImageDataset, **options: Any) -> TrainLoader:
    preprocess = Preprocess((6, 8), mean=(0.0,) * 3, std=(1 / 255,) * 3)  # a pixel stays its grey
    shared: dict[str, Any] = {
        "seed": 0,
        "device": "cpu",
        "augment": Augmentation(),
        "workers": 0,
    }
    return build_loader(dataset, preprocess=preprocess, batch_size=12, **shared | options)


def read_steps(loaders: list[TrainLoader], start: int) -> Iterator[list[int]]:
    """The greys that are on the images of each step, of all ranks one after the other."""
    for batches in zip(*(loader.epoch(1, start_step=start) for loader in loaders), strict=True):
        for batch in batches:
            assert batch.images[:, 0, 0, 0].round().int().tolist() == batch.sample_ids.tolist()
        yield [int(value) for batch in batches for value in batch.images[:, 0, 0, 0].round()]


def ranks(source: ImageDataset, count: int, *, workers: int) -> list[TrainLoader]:
    return [
        make_loader(source, rank=rank, world_size=count, workers=workers) for rank in range(count)
    ]


@pytest.mark.chaos
def test_no_sample_is_lost_or_doubled_by_a_kill_and_other_ranks_and_workers(
    bucket: Bucket, tmp_path: Path, empty_cache: Path
) -> None:
    """Two ranks of two workers are killed in mid-epoch; three of one worker go on after the last
    whole step."""
    source, log = open_all(f"{bucket.url}/{{000..003}}.tar"), tmp_path / "steps.jsonl"

    def train() -> None:
        with log.open("a") as file:
            for step in read_steps(ranks(source, 2, workers=2), start=0):
                file.write(json.dumps(step) + "\n")
                file.flush()
                if log.read_text().count("\n") == 4:
                    os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    before = [json.loads(line) for line in log.read_text().splitlines()]
    after = list(read_steps(ranks(source, 3, workers=1), start=len(before)))
    whole = list(read_steps(ranks(source, 1, workers=0), start=0))
    assert before + after == whole
    assert len(before) == 4
    assert sorted(id for step in whole for id in step) == list(range(COUNT))


def test_the_order_is_that_of_files(bucket: Bucket, empty_cache: Path) -> None:
    loader = make_loader(open_all(f"{bucket.url}/{{000..003}}.tar"))
    ids = torch.cat([batch.sample_ids for batch in loader.epoch(1)])
    assert torch.equal(ids, StatelessRandom(0, 1, torch.arange(COUNT)).permutation())


# --- what goes wrong --------------------------


def test_a_failing_server_is_asked_again_and_in_the_end_named(
    server: ObjectServer, empty_cache: Path, quick_retries: None
) -> None:
    write_shard(server.folder / "a.tar", [0, 1, 2])
    server.failing = 4
    assert greys(open_all(f"{server.url}/a.tar")) == [0, 1, 2]
    server.failing = 10**6
    with pytest.raises(RemoteError, match=r"/a.tar can't be read: 503"):
        open_all(f"{server.url}/a.tar")
    assert 5 <= 10**6 - server.failing <= 10  # each of fsspec's two ways to ask


@pytest.mark.chaos
def test_a_server_that_fails_makes_no_image_unreadable(
    server: ObjectServer, empty_cache: Path, quick_retries: None
) -> None:
    write_shard(server.folder / "a.tar", [n % 3 for n in range(COUNT)])
    source = open_all(f"{server.url}/a.tar")
    server.failing = 10**6
    with pytest.raises(RemoteError, match="can't be read: 503"):
        decode_dataset(source, size=(4, 4), progress=False)
    server.failing = 0
    assert len(decode_dataset(source, size=(4, 4), progress=False)) == COUNT


def test_a_silent_server_is_given_up(
    server: ObjectServer, empty_cache: Path, quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SILENCE", 0.1)
    monkeypatch.setattr(remote, "_MAX_TRIES", 2)
    write_shard(server.folder / "a.tar", [0, 1, 2])
    server.delay = 0.5
    with pytest.raises(RemoteError, match=r"a\.tar can't be read: Timeout on reading"):
        open_all(f"{server.url}/a.tar")


def test_a_slow_server_is_asked_for_many_images_at_once(
    server: ObjectServer, empty_cache: Path
) -> None:
    write_shard(server.folder / "a.tar", [n % 3 for n in range(64)])
    source = open_all(f"{server.url}/a.tar").subset(range(0, 64, 2))
    server.delay, server.most_waiting = 0.2, 0
    source.reader.fetch(range(32))
    assert server.most_waiting >= 16
    server.delay = 0.0
    assert greys(source) == list(range(0, 64, 2))


class Hub:
    """What is read of `HfFileSystem`: a file, `a.tar`, in a repository with commits."""

    endpoint, token = "", None

    def __init__(self) -> None:
        self.commits = {"first": b"0123456789"}

    @property
    def newest(self) -> str:
        return list(self.commits)[-1]

    def resolve_path(self, path: str) -> HfFileSystemResolvedRepositoryPath:
        assert path == "hf://datasets/owner/name/a.tar"
        return HfFileSystemResolvedRepositoryPath("dataset", "owner/name", "main", "a.tar")

    def _content(self, path: str) -> bytes:
        commit = path.partition("@")[2].removesuffix("/a.tar")
        return self.commits[commit or self.newest]

    def info(self, path: str) -> dict[str, Any]:
        content = self._content(path)
        return {"name": path, "size": len(content), "blob_id": str(hash(content))}

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        return self._content(path)[start:end]


def test_a_shard_of_the_hub_is_read_at_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(remote, "_open_filesystem", lambda scheme: hub)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.repo_info", lambda *_, **__: SimpleNamespace(sha=hub.newest)
    )

    def forget() -> None:
        """As in another process."""
        remote._pin_commit.cache_clear()
        remote._find_commit.cache_clear()

    forget()
    file = remote.find_file("hf://datasets/owner/name/a.tar")
    assert file.read(2, 5) == b"234"
    # of the same length: nothing but its version tells
    hub.commits["second"] = b"abcdefghij"
    assert file.read(2, 5) == b"234"
    forget()
    with pytest.raises(RemoteError, match=r"a\.tar has changed since its images were listed"):
        file.read(2, 5)
    # a commit that leaves the file as it was
    hub.commits["third"] = b"0123456789"
    forget()
    assert file.read(2, 5) == b"234"
    forget()


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("{url}/absent.tar", "absent.tar can't be read: it is not there"),
        ("http://127.0.0.1:1/a.tar", "Cannot connect to host"),
        (
            "ftp://host/a.tar",
            "ftp://host/a.tar is not read; known: s3://, hf://, https://, http://",
        ),
        ("gs://bucket/a.tar", "is not read; known"),
        ("file:///etc/a.tar", "is not read; known"),
        ("local://etc/a.tar", "is not read; known"),
        ("tar://a.tar", "is not read; known"),
        ("simplecache::{url}/a.tar", "no file matches simplecache::http"),
        ("{url}/a.tar::/etc/a.tar", "can't be read"),
        ("{{filecache:,x}}:{url}/a.tar", "no file matches filecache::http"),
    ],
)
def test_addresses_that_are_wrong_or_not_for_us_are_named(
    server: ObjectServer, empty_cache: Path, quick_retries: None, root: str, message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        open_all(root.format(url=server.url))


def test_a_server_without_ranges_is_refused(server: ObjectServer, empty_cache: Path) -> None:
    write_shard(server.folder / "a.tar", [n % 3 for n in range(COUNT)])
    server.ranges = False
    with pytest.raises(RemoteError, match="its server gives no byte ranges, or compresses"):
        open_all(f"{server.url}/a.tar")


def test_a_body_that_was_not_asked_for_is_not_read(
    server: ObjectServer, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.folder / "a.tar").write_bytes(bytes(2**20))
    server.ranges = False

    def read(_: object) -> None:
        pytest.fail("the body was read")

    monkeypatch.setattr("aiohttp.ClientResponse.read", read)
    with pytest.raises(RemoteError, match="its server gives no byte ranges"):
        open_all(f"{server.url}/a.tar")


def test_a_bucket_that_is_not_there_and_absent_credentials_are_named(
    s3: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RemoteError, match=r"s3://nobody/a\.tar can't be read: it is not there"):
        open_all("s3://nobody/a.tar")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(
        remote,
        "_open_filesystem",
        lambda scheme: fsspec.filesystem(scheme, skip_instance_cache=True),
    )
    with pytest.raises(
        RemoteError, match=r"s3://nobody/a\.tar can't be read: Unable to locate credentials"
    ):
        open_all("s3://nobody/a.tar")


def test_a_client_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(
        ValueError, match=r"aiohttp .*; pip install '\.\[remote\]' in the clone of vit"
    ):
        open_all("https://host/a.tar")


def test_a_damaged_remote_shard_is_refused(server: ObjectServer, empty_cache: Path) -> None:
    shard = write_shard(server.folder / "a.tar", [0, 1, 2])
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(
        ValueError, match=r"a\.tar (is not a complete tar file|holds no images|has no label)"
    ):
        open_all(f"{server.url}/a.tar")


# --- commands ---------------------------------


@pytest.mark.chaos
def test_a_run_ends_where_shards_disappear_and_goes_on_when_they_are_back(
    server: ObjectServer,
    cli: Launcher,
    tmp_path: Path,
    empty_yaml: Path,
    quick_retries: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "_CACHE_BYTES", 1)  # each epoch reads the images again
    for number in range(4):
        labels = [n % 3 for n in range(30 * number, 30 * number + 30)]
        write_shard(server.folder / f"{number:03d}.tar", labels, first=30 * number)
    options = [text for text in TINY_RUN if not text.startswith(("data.name", "train.batch_size"))]
    options += [
        "data.name=webdataset",
        f"data.root={server.url}/{{000..003}}.tar",
    ]
    options += [
        "train.batch_size=12",
        "train.checkpoint_every_steps=1",
    ]

    def train(name: str, *arguments: str) -> list[object]:
        cache = f"data.cache_dir={tmp_path / name}-cache"
        return ["train", empty_yaml, *options, cache, *arguments, "--output", tmp_path / name]

    assert (
        "workers (images in object storage"
        in cli.succeed(*train("whole", "data.workers=0", "--verbose")).text
    )
    checkpoints = tmp_path / "broken" / "checkpoints"
    server.gone = lambda: any(checkpoints.glob("step-00000009-*"))  # of 7 steps an epoch
    outcome = cli.run(*train("broken", "data.workers=1"))
    assert outcome.code == 2
    assert re.search(
        r"\nvit: error: http://127.0.0.1:\d+/00[0-3].tar can't be read: it is not there\n$",
        outcome.err,
    )
    assert done_steps(tmp_path / "broken") in range(9, 14)
    server.gone = bool
    cli.succeed(*train("broken", "data.workers=2", "--resume"))
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")
    assert read_metrics(tmp_path / "whole")[-1]["step"] == 28


@pytest.mark.docs
def test_commands_of_the_documentation_read_a_bucket(
    bucket: Bucket, cli: Launcher, tmp_path: Path
) -> None:
    commands = [
        command
        for page, command in COMMANDS
        if page.name == "data.md" and "s3://" in " ".join(command)
    ]
    assert len(commands) == 1
    for command in commands:
        command = [
            text.replace("BUCKET", "shards").replace("009", "003").replace("/PHOTOS", "")
            for text in command
        ]
        place = [
            "--output",
            tmp_path / "run",
            f"data.cache_dir={tmp_path}",
            "train.device=cpu",
            "train.compile=false",
            "train.batch_size=8",  # its step is timed for the summary
            "--dry-run",
        ]
        text = cli.succeed(*command[: command.index("--output")], *place).text
        assert "87 " in text
