"""Cases of the fuzzer: caches, data sets, corrections, and the features in a model file."""

import gzip
import json
import math
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.fuzz.damage import change_value, draw_value, mutate, refusals

Case = Callable[[random.Random, Path], None]


def build_data_cases(corpus: Any) -> dict[str, Case]:
    """Return the cases by name."""
    import numpy as np
    import torch

    import vit
    from vit.bundle import load_bundle
    from vit.data.cache import decode_dataset
    from vit.data.corrections import check_corrections, read_corrections
    from vit.data.open import open_dataset
    from vit.model.model_file import compute_checksum
    from vit.prediction.features import compute_features
    from vit.prediction.predictor import BatchPredictor

    bundle = load_bundle(corpus.model)
    bundle.model.requires_grad_(False)
    predictor = replace(BatchPredictor.from_bundle(bundle), precision="bfloat16")
    digits = open_dataset("digits").split("validation").subset(range(40))
    decoded = decode_dataset(digits, size=(8, 8), progress=False)

    def damage_cache(rng: random.Random, folder: Path, compute: Callable[[], torch.Tensor]) -> None:
        """The file that `compute` made is damaged: its result must be the same."""
        expected = compute()
        (path,) = (entry for entry in folder.rglob("*.npz") if entry.is_file())
        path.write_bytes(mutate(path.read_bytes(), rng))
        with warnings.catch_warnings(action="ignore"):
            again = compute()
        assert torch.equal(expected, again), "a damaged cache was used"

    def feature_cache(rng: random.Random, folder: Path) -> None:
        def compute() -> torch.Tensor:
            features = compute_features(predictor, decoded, cache_dir=folder)
            return torch.stack(list(features.values()))

        damage_cache(rng, folder, compute)

    def read_all(dataset: Any) -> None:
        assert 0 <= dataset.labels.min() <= dataset.labels.max() < len(dataset.class_names)
        for index in range(min(len(dataset), 4)):
            with refusals():
                assert dataset.image(index).mode == "RGB"

    def idx(rng: random.Random, folder: Path) -> None:
        """idx files with odd headers and contents, plain or packed."""
        suffix = rng.choice(("", ".gz"))
        for kind, shape in (("images-idx3", (6, 5, 4)), ("labels-idx1", (6,))):
            values = np.arange(math.prod(shape), dtype=np.uint8) % 3
            sides = list(shape)
            if rng.random() < 0.3:
                sides[rng.randrange(len(sides))] = rng.choice(
                    (0, 1, 5, 255, 2**16, 2**31, 2**32 - 1)
                )
            header = bytes([0, 0, 8, len(shape)]) + np.array(sides, dtype=">u4").tobytes()
            content = header + values.tobytes()
            if rng.random() < 0.1:
                content += bytes(2**24)
            if rng.random() < 0.4:
                content = mutate(content, rng)
            packed = gzip.compress(content, 1) if suffix else content
            if rng.random() < 0.2:
                packed = mutate(packed, rng)
            for split in ("train", "t10k"):
                (folder / f"{split}-{kind}-ubyte{suffix}").write_bytes(packed)
        with refusals():
            read_all(open_dataset("mnist", root=folder, cache_dir=folder / "cache").split("all"))

    def drawn_parquet(rng: random.Random, folder: Path) -> None:
        """A Parquet file with columns of odd types, values and metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        photo = corpus.images[4].read_bytes()
        outside, inside = str(corpus.images[4]), folder / "inside.png"
        inside.write_bytes(photo)
        images = [
            lambda: {"bytes": photo, "path": None},
            lambda: {"bytes": mutate(photo, rng), "path": "x.png"},
            lambda: {
                "bytes": None,
                "path": rng.choice((outside, str(inside), "/dev/zero", "a\0b", "")),
            },
            lambda: {"bytes": None, "path": None},
            lambda: None,
        ]
        columns = [
            [rng.choice(images)() for _ in range(3)],
            [photo, photo, mutate(photo, rng)],
            [[1, 2], [3], None],
            [1.5, None, math.nan],
            ["a", outside, None],
            [{"path": outside, "extra": 1}] * 3,
        ]
        labels = [[0, 1, 0], ["a", "b", "a"], [0, -1, 1], [None, 0, 1], [2**62, 0, 1], [0.5, 1, 2]]
        labels += [
            [[0], [1], [0]],
            [b"a", b"\xff", b"c"],
            [True, False, True],
            ["", " ", "x" * 3000],
        ]
        table = pa.table({"image": rng.choice(columns), "label": rng.choice(labels)})
        if rng.random() < 0.6:
            features = {
                "image": {"_type": "Image"},
                "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
            }
            info: dict[str, Any] = {"info": {"features": features}}
            for _ in range(rng.randrange(3)):
                change_value(info, rng)
            table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
        path = folder / "train.parquet"
        pq.write_table(table, path)
        with refusals():
            source = open_dataset("huggingface", root=path, cache_dir=folder / "cache").split("all")
            for index in range(len(source)):
                with suppress(ValueError):
                    assert source.reader[index] != Path(outside), "an image outside is read"
            read_all(source)
            source.reader.cache_key()

    def hub_folder(rng: random.Random, folder: Path) -> None:
        """A directory of save_to_disk, one of whose files is damaged."""
        root = folder / "saved"
        shutil.copytree(corpus.saved, root)
        path = rng.choice(sorted(entry for entry in root.rglob("*") if entry.is_file()))
        if path.suffix == ".json" and rng.random() < 0.7:
            values = json.loads(path.read_text())
            change_value(values, rng)
            path.write_text(json.dumps(values))
        else:
            path.write_bytes(mutate(path.read_bytes(), rng))
        with refusals():
            read_all(
                open_dataset("huggingface", root=root, cache_dir=folder / "cache").split("all")
            )

    def torchvision_set(rng: random.Random, folder: Path) -> None:
        """The files of a published set, one of them damaged."""
        from tests.data.sources.test_torchvision_sets import WRITERS

        name = rng.choice(list(WRITERS))
        WRITERS[name][0](folder)
        path = rng.choice(sorted(entry for entry in folder.rglob("*") if entry.is_file()))
        path.write_bytes(mutate(path.read_bytes(), rng))
        # a missing file would be downloaded
        no_network = patch("socket.getaddrinfo", side_effect=OSError("no network"))
        with refusals(), no_network:
            read_all(open_dataset(name, root=folder, cache_dir=folder / "cache").split("train"))

    def corrections(rng: random.Random, folder: Path) -> None:
        splits = open_dataset("digits")
        before = splits.split("all")
        lines = ["path,given,label"]
        lines += [f"{name},{rng.randrange(10)},{rng.randrange(12)}" for name in before.ids[:4]]
        path = folder / "corrections.csv"
        path.write_bytes(mutate("\n".join(lines).encode(), rng))
        with refusals():
            read = read_corrections(path)
            check_corrections(before, read)
            after = replace(splits, corrections=read).split("all")
            for index in np.flatnonzero(after.labels != before.labels):
                assert after.class_names[after.labels[index]] == read[after.ids[index]]

    def model_features(rng: random.Random, folder: Path) -> None:
        """Other features, distances, hashes or thresholds in a model file, with a right checksum."""
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        tensors = load_file(corpus.model)
        with safe_open(corpus.model, framework="pt") as file:
            values = json.loads(file.metadata()["vit"])
        name = rng.choice([key for key in tensors if "likeness" in key or "hashes" in key])
        tensor = tensors[name]
        factors = (0, -1, 2, 1e-8, 1e4, math.nan)
        change = rng.randrange(8)
        if change == 0:
            del tensors[name]
        elif change == 1:
            tensors[name] = (tensor.double() * rng.choice(factors)).to(tensor.dtype)
        elif change == 2:
            tensors[name] = tensor[: rng.choice((0, 1, len(tensor) - 1))].clone()
        elif change == 3:
            tensors[name] = tensor[..., :1].clone()
        elif change == 4:
            tensors[name] = tensor.to(rng.choice((torch.float64, torch.int32, torch.uint8)))
        elif change == 5:
            values["conformal"]["thresholds"] = {draw_value(rng).__repr__(): draw_value(rng)}
        else:
            change_value(rng.choice((values, values["conformal"])), rng)
        values.pop("content_sha256", None)
        values["content_sha256"] = compute_checksum(tensors, values)
        path = folder / "model.safetensors"
        save_file(tensors, path, metadata={"vit": json.dumps(values)})
        with refusals():
            changed = load_bundle(path)
            (found,) = vit.predict(changed, corpus.images[4]).predictions
            assert found.p_value is None or 0 < found.p_value <= 1

    cases = (feature_cache, idx, drawn_parquet, hub_folder)
    more = (torchvision_set, corrections, model_features)
    return {case.__name__: case for case in (*cases, *more)}
