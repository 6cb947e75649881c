"""What torch can't compile is computed as it is."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from PIL import Image
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import TINY_RUN, Launcher, SaveModel
from vit.config import load_config
from vit.data import cache as decoding
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.processes import Process
from vit.training.compiled_function import CompiledBlocks, CompiledFunction, should_compile
from vit.training.run import build_run
from vit.training.train_step import TrainStep


def cube(values: Tensor) -> Tensor:
    return (values**3).sum()


def build_failing_backend(failing: str) -> Any:
    """A compiler that fails in one of the passes, "fw_compiler" or "bw_compiler"."""

    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no Python.h\nand more lines")

    compilers: dict[str, Any] = {
        name: fail if name == failing else lambda graph, inputs: make_boxed_func(graph)
        for name in ("fw_compiler", "bw_compiler")
    }
    return aot_autograd(**compilers)


needs_compiler = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch compiles no training step before 2.10"
)


def test_an_older_torch_trains_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert should_compile("cpu", total_flops=1e16) == (torch.__version__ >= "2.10")
    monkeypatch.setattr("vit.training.compiled_function._OLDEST_TORCH", "99")
    assert not should_compile("cpu", total_flops=1e16)
    with pytest.warns(UserWarning, match=r"\(torch 2\..* is older than 99\); training goes on"):
        assert float(CompiledFunction(cube)(torch.tensor([1.0, 2.0]))) == 9.0


@needs_compiler
@pytest.mark.parametrize("failing", ["fw_compiler", "bw_compiler"])
def test_a_compiler_that_fails_in_either_pass_is_done_without(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = build_failing_backend(failing)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    function = CompiledFunction(cube)
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.warns(UserWarning, match="could not compile the training step .*goes on without"):
        function(values).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3.0, 12.0]
    # said once
    with warnings.catch_warnings(action="error"):
        assert float(function(values).detach()) == 9.0


@needs_compiler
def test_only_force_non_lazy_backward_lowering_finds_a_failing_backward_pass_in_time() -> None:
    """torch's private setting: without it the forward pass succeeds, and nothing can be done without
    compiling any more when its backward pass fails."""
    backend = build_failing_backend("bw_compiler")
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    torch._dynamo.reset()
    loss = torch.compile(cube, dynamic=False, backend=backend)(values)
    with pytest.raises(RuntimeError, match=r"no Python\.h"):
        loss.backward()

    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        pytest.raises(RuntimeError, match=r"no Python\.h"),
    ):
        torch.compile(cube, dynamic=False, backend=backend)(values)


def test_an_error_of_the_function_itself_is_raised() -> None:
    def refuse(values: Tensor) -> Tensor:
        raise ValueError("what it says")

    torch._dynamo.reset()
    function = CompiledFunction(refuse)
    with (
        pytest.warns(UserWarning, match="could not compile"),
        pytest.raises(ValueError, match="what it says"),
    ):
        function(torch.ones(1))


@needs_compiler
@pytest.mark.extended
def test_code_compiled_for_another_kernel_of_attention_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's cache on disk knows nothing of the flags that choose the kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens = torch.randn(1, 1, 4, 8, requires_grad=True)

    def attend(part: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(part, part, part).sum()

    found = []
    for kernels in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        torch._dynamo.reset()
        counters.clear()
        with sdpa_kernel(kernels), torch.profiler.profile() as profile:
            CompiledFunction(attend)(tokens)
        uses_flash = any("flash_attention" in event.key for event in profile.key_averages())
        found.append((counters["aot_autograd"]["autograd_cache_hit"], uses_flash))
    assert found == [(0, True), (0, False), (1, True)]


@pytest.mark.extended
def test_without_a_c_compiler_a_run_trains_uncompiled(
    cli: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    overrides = ["train.compile=true", "train.max_steps=2", "train.device=cpu"]
    process = cli.start("train", "digits", *overrides, "--output", tmp_path / "run")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "could not compile the training step" in err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "could not compile" in line]
    assert line.startswith("warning: torch could not compile the training step (")


@needs_compiler
def test_more_shapes_are_compiled_than_torch_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image sizes × rates of dropped patches × lengths of micro-batches; from the ninth on torch
    would go on without compiling."""
    compiled: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda graph, _: make_boxed_func(graph))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    function = CompiledFunction(cube)
    for length in range(2, 14):
        function(torch.ones(length, requires_grad=True))
    assert len(compiled) == 12
    assert function.is_compiled


@needs_compiler
@pytest.mark.parametrize("kind", ["", "the compiler fails", "checkpointing"])
def test_blocks_are_compiled_alone_and_share_their_code(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One graph for each image size, whatever the number of blocks and the form of the targets, also
    where a block is computed again in the backward pass."""
    fails = kind == "the compiler fails"
    compiled: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        if fails:
            raise RuntimeError("no Python.h")
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda graph, _: make_boxed_func(graph))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    model = VisionTransformer(
        8,
        2,
        num_classes=3,
        embed_dim=16,
        depth=3,
        num_heads=2,
        global_pool="avg",
        pos_embed="sincos",
    ).train()

    model.patch_embed.dynamic_img_size = True
    model.grad_checkpointing = kind == "checkpointing"

    def compute(images: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(images), targets)

    function = CompiledBlocks(compute, model.blocks)
    for size in (8, 4):
        images = torch.randn(2, 3, size, size)
        for targets in (torch.tensor([0, 2]), torch.rand(2, 3)):
            gradients = []
            for compute_loss in (compute, function):
                with warnings.catch_warnings(record=fails, action="always"):
                    loss = compute_loss(images, targets)
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            torch.testing.assert_close(*gradients)
            assert all("forward" not in vars(block) for block in model.blocks)
    assert function.is_compiled != fails
    assert len(compiled) == (1 if fails else 2)


@needs_compiler
@pytest.mark.extended
def test_all_blocks_of_a_deep_model_are_compiled_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has another rate of dropped paths, so another form."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    counters.clear()
    model = VisionTransformer(
        12, 2, num_classes=3, embed_dim=8, depth=24, num_heads=1, drop_path_rate=0.3
    ).train()
    model.patch_embed.dynamic_img_size = True
    function = CompiledBlocks(model, model.blocks)
    for size in (4, 8, 12):
        # torch's own warnings
        with warnings.catch_warnings(action="ignore"):
            function(torch.randn(2, 3, size, size))
    assert function.is_compiled
    assert counters["stats"]["unique_graphs"] == 3 * 24
    assert not counters["unimplemented"]


_MIXED = "augment.mixup=0.2 augment.cutmix=1 train.class_balance=weights train.grad_accum_steps=3"
_UNMIXED = "augment.cutmix=1 augment.mix_until=0 model.drop_path_rate=0.2 train.ema_decay=0.9"
_SIZES = "train.image_sizes=[[0.5,0.5],[1,1]] train.patch_drop_rates=[[0.5,0.25]]"
_AGAIN = "train.grad_checkpointing=true"


@needs_compiler
@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (_MIXED, ""),
        (_UNMIXED, ""),
        (_SIZES, "blocks"),
        (_AGAIN, "blocks"),
        ("data.pipeline=cached augment.resized_crop_scale=[0.5,1]", "several labels"),
        ("train.precision=bfloat16", "teacher"),
        ("", "the compiler fails"),
    ],
)
def test_the_first_step_is_compiled_while_the_images_are_decoded(
    overrides: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    save_model: SaveModel,
) -> None:
    """The first step compiles nothing more, and the run is the one of decoded images, bit for
    bit."""
    compiled: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        if kind == "the compiler fails":
            raise RuntimeError("no Python.h")
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda graph, _: make_boxed_func(graph))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(decoding, "_FEW", 0)
    monkeypatch.setattr(decoding, "_CHUNK", 1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    if kind == "blocks":

        def compile_blocks(step: TrainStep) -> CompiledBlocks:
            return CompiledBlocks(step._compute_loss, step.module.blocks)

        monkeypatch.setattr(TrainStep, "_build_compiled", compile_blocks)

    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    rows = ["path,label"]
    for number in range(48):
        pixels = rng.integers(1, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        other = "cat|dog" if kind == "several labels" else "dog"
        rows.append(f"{number}.png,{'cat' if number % 3 else other}")
    table = tmp_path / "images" / "images.csv"
    table.write_text("\n".join(rows))
    options = [*TINY_RUN, f"data.root={table}", "data.name=folder", "data.workers=2"]
    options += [f"data.cache_dir={tmp_path / 'cache'}", "train.batch_size=12", "train.epochs=2"]
    options += ["train.compile=true", *overrides.split()]
    if kind == "teacher":
        teacher = save_model(
            tmp_path / "teacher.safetensors", class_names=("cat", "dog"), img_size=8
        )
        options.append(f"train.teacher={teacher}")

    passes: list[bool] = []
    forward_backward = TrainStep.forward_backward

    def watch(step: TrainStep, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        passes.append(any((tmp_path / "cache").glob("*.building")))
        return forward_backward(step, images, targets)

    monkeypatch.setattr(TrainStep, "forward_backward", watch)
    states = []
    for name in ("ahead", "decoded"):
        torch._dynamo.reset()
        compiled.clear()
        passes.clear()
        (tmp_path / name).mkdir()
        with warnings.catch_warnings(record=True, action="always") as caught:
            run = build_run(
                load_config({}, options),
                directory=tmp_path / name,
                process=Process(),
                device_name="cpu",
                observers=[],
            )
            step = run.trainer.train_step
            assert passes == ([True] if name == "ahead" else [])
            num_ahead = len(compiled)
            assert bool(num_ahead) == (name == "ahead")
            assert step.module.training
            assert all(weight.grad is None for weight in step.module.parameters())
            states.append({"random numbers": torch.get_rng_state()})
            run.trainer.plan = replace(run.trainer.plan, total_steps=2)
            run.trainer.train()
        states[-1] |= step.averaged_model.state_dict()
        fails = kind == "the compiler fails"
        assert [str(warning.message)[:23] for warning in caught] == [
            "torch could not compile"
        ] * fails
        if name == "ahead" and not fails:
            assert len(compiled) == num_ahead
            assert not passes[-1]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
