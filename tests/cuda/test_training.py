"""Runs on a GPU: resumed to the same bytes, without a wait, and as a CUDA graph."""

import warnings
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.training.conftest import flatten, read_metrics, run_until
from vit.config import load_config
from vit.model.attention import attend_fused
from vit.runtime.device import (
    count_bytes,
    free_cached_memory,
)
from vit.training.observers import LOG_EVERY_STEPS, Observer
from vit.training.run import Run, build_run
from vit.training.train_step import capture_step

TINY = [
    "data.name=digits",
    "data.image_size=8",
    "model.patch_size=2",
    "model.embed_dim=64",
    "model.depth=2",
    "model.num_heads=1",
    "model.drop_path_rate=0.2",
    "augment.crop_padding=1",
    "train.batch_size=128",
    "train.epochs=2",
    "train.ema_decay=0.9",
    "train.clip_grad=1.0",
]
OPTIMIZERS = ["muon", "adamw", "sgd"]


def make_run(
    directory: Path, device: torch.device, *overrides: str, observers: list[Observer] | None = None
) -> Run:
    directory.mkdir(parents=True, exist_ok=True)
    config = load_config(None, [*TINY, *overrides])
    run = build_run(config, directory=directory, device_name=str(device))
    run.trainer.observers = observers or []
    return run


def read_state(run: Run) -> dict[str, Any]:
    return flatten(run.trainer.train_step.state_dict())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_is_resumed_to_the_same_bytes(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    compiled: bool,
) -> None:
    if compiled and device.type != "cuda":
        pytest.skip("compiled for the CPU elsewhere")
    # the tests' own checks of shapes break graphs
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", compiled)
    overrides = [
        f"optimizer.name={optimizer}",
        "train.checkpoint_every_steps=4",
        f"train.compile={str(compiled).lower()}",
    ]
    whole = make_run(tmp_path / "whole", device, *overrides)
    whole.trainer.train()

    run_until(make_run(tmp_path / "broken", device, *overrides), 7)
    resumed = make_run(tmp_path / "broken", device, *overrides)
    assert resumed.trainer.resume()
    assert resumed.trainer.progress.step == 4
    resumed.trainer.train()

    expected = read_state(whole)
    state = read_state(resumed)
    assert state.keys() == expected.keys()
    different = [key for key in state if not torch.equal(state[key], expected[key])]
    assert different == []
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "broken")


class WaitsRefused(Observer):
    """CUDA refuses waits from the second step of an interval to its last but one."""

    def __init__(self) -> None:
        self.num_refusing = 0

    def on_step(self, metrics: dict[str, Any]) -> None:
        step_of_interval = metrics["step"] % LOG_EVERY_STEPS
        refuses = 1 <= step_of_interval < LOG_EVERY_STEPS - 1
        self.num_refusing += refuses
        with warnings.catch_warnings():
            # that it doesn't find every wait
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error" if refuses else "default")


def test_eighteen_of_twenty_steps_wait_for_nothing(cuda: torch.device, tmp_path: Path) -> None:
    observer = WaitsRefused()
    overrides = ["optimizer.name=muon", "train.batch_size=32", "train.epochs=1"]
    run = make_run(tmp_path, cuda, *overrides, observers=[observer])
    try:
        run.trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert observer.num_refusing >= LOG_EVERY_STEPS - 2


def test_steps_that_run_out_of_memory_go_on_in_micro_batches(
    cuda: torch.device, tmp_path: Path
) -> None:
    """Of the memory that a step takes, less than half may be had."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4096, 3, 8, 8, generator=generator).to(cuda)
    labels = torch.randint(10, (4096,), generator=generator).to(cuda)
    # whose steps are in proportion to the gradients, so that these differ by rounding alone
    overrides = ["optimizer.name=sgd", "model.drop_path_rate=0", "train.precision=float32"]
    steps = [
        make_run(tmp_path / name, cuda, *overrides, "train.grad_accum_steps=1").trainer.train_step
        for name in ("whole", "split")
    ]
    whole, split = steps
    for step in steps:
        # makes the optimizer's state
        step(images[:128], labels[:128])

    free_cached_memory(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    whole(images, labels)
    step_bytes = torch.cuda.max_memory_allocated(cuda) - before
    free_cached_memory(cuda)
    limit = torch.cuda.memory_reserved(cuda) + step_bytes // 2
    torch.cuda.set_per_process_memory_fraction(limit / count_bytes(cuda)[1], cuda)
    try:
        with pytest.warns(UserWarning, match="4096 images did not fit the GPU's memory"):
            split(images, labels)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * step_bytes, dtype=torch.uint8, device=cuda)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert split.grad_accum_steps > 1
    expected = flatten(whole.state_dict()["model"])
    for name, value in flatten(split.state_dict()["model"]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_step_equals_the_eager_one(
    cuda: torch.device, tmp_path: Path, optimizer: str
) -> None:
    """The whole step as a CUDA graph, replayed on other batches, to the last bit: a resumed run
    begins with other steps as they are."""
    overrides = [f"optimizer.name={optimizer}"]
    eager, captured = steps = [
        make_run(tmp_path / name, cuda, *overrides).trainer.train_step
        for name in ("eager", "captured")
    ]
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(128, 3, 8, 8, generator=generator).to(cuda),
            torch.randint(10, (128,), generator=generator).to(cuda),
        )
        for _ in range(8)
    ]
    for step in steps:
        step.captures = False
        for seed, batch in enumerate(batches[:3]):
            torch.manual_seed(seed)  # of the paths that are dropped
            step(*batch)
    replay = capture_step(captured.run_on_device, captured.optimizer, *batches[0])
    for seed, batch in enumerate(batches[3:]):
        torch.manual_seed(seed)
        expected = eager(*batch)
        torch.manual_seed(seed)
        captured.set_schedule_values()
        result = replay(*batch)
        captured.num_steps += 1
        assert torch.equal(result.loss, expected.loss)
    expected_state, state = (flatten(step.state_dict()) for step in steps)
    assert [key for key in state if not torch.equal(state[key], expected_state[key])] == []


@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(64, 64), (1, 128)], ids=["64 tokens", "one query"]
)
def test_the_backward_pass_of_attention_is_finite(
    cuda: torch.device, num_queries: int, num_keys: int
) -> None:
    """Where cuDNN's is NaN, also in a loop that has never called `choose_device`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 2, 8, 128, 64, generator=generator).to(cuda, torch.bfloat16)
    query, key = (0.1 * tokens[:2]).clone()
    query[..., 0] = 1
    key[..., 0] = -960
    parts = (query[..., :num_queries, :], key[..., :num_keys, :], tokens[2, ..., :num_keys, :])
    inputs = [part.clone().requires_grad_() for part in parts]
    uses_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        output = attend_fused(*inputs)
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)

        # the control: the same scores as they are
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            output = torch.nn.functional.scaled_dot_product_attention(*inputs)
            gradients = torch.autograd.grad(output.sum(), inputs)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
    if all(bool(gradient.isfinite().all()) for gradient in gradients):
        version = torch.backends.cudnn.version()
        pytest.skip(f"nothing shown: cuDNN {version} is finite here without the guard, too")
