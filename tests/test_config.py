"""The configuration: defaults, overrides, and what a mistake is told."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vit.config import (
    Config,
    load_config,
    values_to_save,
)
from vit.runtime.arguments import as_pair
from vit.training.plan import resolve_image_sizes


def test_overrides_are_laid_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {epochs: 3}\noptimizer: {lr: 1e-3}\n")
    config = load_config(
        path, ["train.epochs=7", "optimizer.weight_decay=1e-4", "data.image_size=[32, 64]"]
    )
    assert config.train.epochs == 7
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.weight_decay == 1e-4
    assert as_pair(config.data.image_size, name="image_size") == (32, 64)


def test_a_dumped_configuration_loads_as_an_equal_one(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "train.image_sizes=[[0.5, 0.75], [1.0, 1]]",
            "data.root=123",
            'data.classes=["cat", "dog"]',
            "model.freeze=2",
        ],
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values_to_save(config)))
    assert load_config(path) == config
    assert config.data.root == str(Path("123").absolute())


@pytest.mark.parametrize(
    "name",
    [
        "photos #2",
        "a: b",
        "a 'b' c",
        'the "best" ones',
        "- x",
        "{0}",
        "[a",
        "50 %",
        "*x",
        "&y",
        "~z",
    ],
)
def test_a_path_with_any_characters_stays_one(name: str) -> None:
    config = load_config(None, [f"data.corrections=/x/{name}", f"data.label_by={name}"])
    assert str(config.data.corrections) == f"/x/{name}"
    assert config.data.label_by == name
    saved = load_config(yaml.safe_load(yaml.safe_dump(values_to_save(config))))
    assert saved == config


def test_the_folder_of_the_images_is_absolute_and_shard_patterns_stay() -> None:
    def root(value: str) -> str | None:
        return load_config({"data": {"name": "webdataset", "root": value}}).data.root

    assert root("shards") == str(Path("shards").absolute())
    assert root("~/shards") == str(Path.home() / "shards")
    for pattern in ("s-{000..009}.tar", "shards/*", "a.tar::b.tar"):
        assert root(pattern) == pattern


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epohcs=3", r"unknown key train\.epohcs; did you mean train\.epochs\?"),
        ("train.lr=1", r"unknown key train\.lr; did you mean optimizer\.lr\?"),
        ("tran.epochs=3", "unknown key tran; did you mean train"),
        ("train.calibrate=true", r"train\.calibrate; .* Leave out keys of old versions"),
        ("train.epochs=three", r"train\.epochs: .*integer.*'three'"),
        ("train.epochs=0", r"train\.epochs: .*greater than 0"),
        ("data.image_size=30", r"data\.image_size 30 .* model.patch_size 4; try 32"),
        ("train.image_sizes=[[0.5, 1.5]]", r"train\.image_sizes.*less than or equal to 1"),
        ("train.image_sizes=[[0.5, 0]]", r"train\.image_sizes.*greater than 0"),
        ("train.patch_drop_rates=[[0.5, 1]]", r"train\.patch_drop_rates.*less than 1"),
        ("train.patch_drop_rates=0.5", r"train\.patch_drop_rates.*list"),
        ('augment={"resized_crop_scale": [0.5, 1], "crop_padding": 4}', "augment: .*two ways"),
        ("data.classes=[cat, dog]", r'data\.classes: .*JSON, such as \["cat", "dog"\]'),
        ("model.freeze=true", r"model\.freeze: true and false are not values"),
        ("model.freeze=-1", r"model\.freeze"),
        ("train.batch_size=true", r"train\.batch_size: true and false"),
        ("train.ema_decay=true", r"train\.ema_decay: true and false"),
        ("train.image_sizes=[[1, 1], [0.5, 0.5]]", r"train\.image_sizes.*must rise"),
        ("train.patch_drop_rates=[[0.5, 0.5], [0.5, 0]]", r"train\.patch_drop_rates.*must rise"),
        ("train", "not of the form key.path=value"),
        ("train.epochs.x=3", r"train\.epochs"),
    ],
)
def test_a_mistake_is_named_with_a_hint(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(None, [override])


def resolve(config: Config) -> tuple[Any, ...]:
    patch_size = as_pair(config.model.patch_size, name="model.patch_size")
    return resolve_image_sizes(config.train.image_sizes or (), config.data.size, patch_size)


def test_sizes_follow_the_image_size() -> None:
    sizes = "train.image_sizes=[[0.6, 0.75], [1, 1]]"
    config = load_config(None, [sizes, "data.image_size=[64, 96]", "model.patch_size=4"])
    assert resolve(config) == ((0.6, (48, 72)), (1.0, (64, 96)))
    config = load_config(None, [sizes, "data.image_size=[64, 96]", "model.patch_size=16"])
    assert resolve(config)[0] == (0.6, (48, 64))  # whole patches: 4.5 rounds to 4


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    for text, message in (
        ("[1, 2]", "holds a list"),
        ("a: [", "not valid YAML"),
        ("train: 3", "train: "),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(path)
    with pytest.raises(FileNotFoundError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
