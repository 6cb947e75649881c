"""Into how many micro-batches a batch is split; when a run is compiled, and where compiled code is
kept."""

import os

import pytest
import torch

from vit.config import load_config
from vit.model.vision_transformer import VisionTransformer
from vit.training.compiled_function import should_compile
from vit.training.micro_batches import choose_grad_accum_steps
from vit.training.run import build_plan, choose_compile


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("size", "patch", "width", "batch", "steps"),
    [
        (32, 4, 192, 256, 4),
        (32, 4, 128, 256, 3),
        (8, 4, 16, 64, 1),
        (224, 16, 768, 32, 7),
        (224, 16, 768, 1, 1),
    ],
)
def test_a_micro_batchs_widest_activation_takes_three_mebibytes_a_thread(
    size, patch, width, batch, steps
):
    model = VisionTransformer(size, patch, num_classes=10, embed_dim=width, depth=1, num_heads=2)
    assert (
        choose_grad_accum_steps(
            model,
            batch_size=batch,
            image_size=(size, size),
            device=torch.device("cpu"),
            precision="float32",
        )
        == steps
    )
    tokens = (size // patch) ** 2
    if steps > 1:
        assert -(-batch // steps) * tokens * 4 * width * 2 <= 6 * 2**20


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch compiles nothing before 2.10")
def test_only_long_runs_on_known_devices_are_compiled():
    assert should_compile("cpu", total_flops=1e16)
    assert not should_compile("cpu", total_flops=1e13)
    assert should_compile("cpu", total_flops=2e14)
    assert not should_compile("cpu", total_flops=2e14, num_sizes=2)
    assert should_compile("cuda", total_flops=1e18)
    assert not should_compile("xpu", total_flops=1e18)


def test_without_a_compiler_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "c++")
    assert not should_compile("cpu", total_flops=1e18)


def test_compiled_code_is_kept_unless_the_user_chose_another_place(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config = load_config(None, ["train.compile=true", f"data.cache_dir={tmp_path}"])
    model = torch.nn.Linear(1, 1)
    plan = build_plan(config, model, steps_per_epoch=1, batch_size=1)
    assert choose_compile(config, model, plan, torch.device("cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert choose_compile(config, model, plan, torch.device("cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
