"""Memory that is freed is kept for the next allocation."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Launcher
from vit.data.images import read_image

_COUNT_FAULTS = """
import resource
import torch
from vit.runtime.memory import keep_freed_memory

assert keep_freed_memory()
values = torch.ones(16 * 2**20)
for _ in range(20):
    values + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    values + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_memory_is_not_faulted_in_again(cli: Launcher) -> None:
    faults = cli.finish(cli.start(program=("-c", _COUNT_FAULTS))).out
    assert int(faults) < 50  # pages; without it 163,840 of 4 KiB, or 320 huge ones


def test_an_image_of_too_many_pixels_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("1", (20_000, 5_001)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="20,000 x 5,001 pixels, more than 100,000,000; set VIT_M"):
        read_image(tmp_path / "a.png")
    Image.new("1", (20_000, 10_000)).save(tmp_path / "b.png")
    with pytest.raises(ValueError, match="it has more than 100,000,000 pixels; set VIT_MAX_PIXELS"):
        read_image(tmp_path / "b.png")
    Image.new("1", (20, 20)).save(tmp_path / "c.png")
    monkeypatch.setenv("VIT_MAX_PIXELS", "399")
    with pytest.raises(ValueError, match="20 x 20 pixels, more than 399"):
        read_image(tmp_path / "c.png")


_ANSWER = """
import io, re, sys
from pathlib import Path

import vit
from fastapi.testclient import TestClient
from PIL import Image

from vit.deploy.serve.app import build_app
from vit.runtime.memory import keep_freed_memory

def read_peak():
    return int(re.search(r"VmHWM:\\s*(.*) kB", Path("/proc/self/status").read_text())[1]) // 1024

assert keep_freed_memory()
model, small, large, *_ = paths = sys.argv[1:]
bundle = vit.load_bundle(model)
client = TestClient(build_app(bundle, hosts=["testserver"]))

def post(path):
    answer = client.post("/predict?map=true", files={"image": Path(path).read_bytes()})
    assert answer.status_code == 200, answer.text

post(small)
vit.predict(bundle, small)
before = read_peak()
post(large)
post(large)
served = read_peak()
assert len(vit.predict(bundle, paths[2:]).predictions) == 8
print(served - before, read_peak() - before)
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_small_files_of_many_pixels_take_the_memory_of_two_or_three(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path
) -> None:
    """Files of 4 kB with 36 million pixels, 144 MB of RGB, one after the other in `vit serve` and
    eight at once in `vit predict`."""
    Image.new("1", (60, 60)).save(tmp_path / "small.png")
    large = tmp_path / "large.png"
    Image.new("1", (6_000, 6_000)).save(large)
    assert large.stat().st_size < 6_000
    paths = (tiny_model_file, tmp_path / "small.png", *[large] * 8)
    out = cli.finish(cli.start(*paths, program=("-c", _ANSWER))).out
    served, predicted = map(int, out.split())
    assert served < 3 * 144
    assert predicted < 3.5 * 144
