# ruff: noqa: PT017 (either outcome is right)
"""A thousand cases of bad input: `make fuzz` runs twenty thousand."""

import io
import json
import math
import random
import re
import tarfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import Launcher
from tests.fuzz.data_cases import Case, build_data_cases
from vit.config import Config, load_config
from vit.model.model_file import check_metadata
from vit.runtime.documents import parse_json, parse_yaml
from vit.runtime.metrics_file import load_metrics

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
)
KEYS = [
    f"{section}.{key}"
    for section, field in Config.model_fields.items()
    for key in field.annotation.model_fields
]  # type: ignore[union-attr]
often = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.chaos
def test_a_thousand_damaged_files_are_read_or_refused_in_one_line(cli: Launcher) -> None:
    command = ("-m", "tests.fuzz.fuzzer", "--cases", "700", "--processes", "1", "--seconds", "50")
    process = cli.start(program=command)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert re.search(r"\d+ cases in \d+ s, \d+ MiB at most, failures: 0", out)


@pytest.fixture(scope="module")
def data_cases(tiny_model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("corpus")
    Image.new("RGB", (12, 10), "red").save(folder / "image.png")
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for number in range(3):
            tar.add(folder / "image.png", f"{number}.png")
            label = tarfile.TarInfo(f"{number}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(str(number % 2).encode()))
    images = [folder / "image.png"] * 5
    corpus = SimpleNamespace(model=tiny_model_file, images=images, shard=folder / "shard.tar")
    return build_data_cases(corpus)


@pytest.mark.parametrize(
    "name",
    [
        "feature_cache",
        "token_cache",
        "shard_index",
        "idx",
        "corrections",
        "masks",
        "model_features",
    ],
)
def test_damaged_data_is_never_used_in_silence(
    data_cases: dict[str, Case], name: str, tmp_path: Path
) -> None:
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with warnings.catch_warnings(action="ignore"):
            data_cases[name](random.Random(seed), folder)


@often
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_of_any_setting_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    section, name = key.split(".")
    try:
        config = load_config({section: {name: value}})
    except ValueError as error:
        assert len(str(error)) < 2000
        return
    numbers = [
        number for number in vars(getattr(config, section)).values() if isinstance(number, float)
    ]
    assert all(map(math.isfinite, numbers))


@often
@given(text=st.text(alphabet="ab:{}[],&*!<-? \\n\"'|>#%@`0.~\t", max_size=60))
def test_any_yaml_is_plain_values_or_refused(text: str) -> None:
    try:
        json.dumps(parse_yaml(text, origin="x"), default=str)
    except ValueError as error:
        assert "x is not valid YAML" in str(error)
    except TypeError:
        pytest.fail("a key that is no plain value")


@often
@given(text=st.text(alphabet='{}[]":,0123456789.eE+-truefalsn', max_size=60))
def test_any_json_is_a_value_or_refused(text: str) -> None:
    try:
        parse_json(text, origin="x")
    except ValueError as error:
        assert "x is not valid JSON" in str(error)


@often
@given(
    section=st.sampled_from(["architecture", "preprocess", "config", "class_names", "temperature"]),
    value=VALUES,
)
def test_any_metadata_is_taken_or_refused(tiny_bundle: Any, section: str, value: Any) -> None:
    try:
        checked = check_metadata({**tiny_bundle.metadata, section: value}, origin="x")
    except ValueError as error:
        assert "x" in str(error)
        return
    assert math.isfinite(checked.get("temperature", 1.0))


@often
@given(
    lines=st.lists(VALUES.map(lambda value: json.dumps(value)) | st.text(max_size=20), max_size=4)
)
def test_any_metrics_are_numbers_or_refused(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(line + "\n" for line in lines).encode(errors="surrogatepass"))
    try:
        found = load_metrics(path)
    except ValueError as error:
        assert "metrics.jsonl" in str(error)
        return
    assert all(type(each["step"]) is int for each in found)
