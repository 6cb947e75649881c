"""What is put around or into a model changes no map, or is refused in a sentence."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.explanation.model_zoo import build
from vit.explanation.capture.forward import capture_attention
from vit.explanation.methods.maps import compute_maps

METHODS = ("rollout", "gae", "libra-removal")


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this process alone."""
    path: Path = tmp_path_factory.mktemp("group") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compile_lazily(model: nn.Module) -> nn.Module:
    """Without a compiler: what matters is that its code would run past hooks."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nn.Sequential": nn.Sequential,
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "torch.compile": compile_lazily,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_has_the_maps_of_the_model(name: str) -> None:
    model, images = build("timm")
    _, _, expected = compute_maps(model, images, methods=METHODS)
    _, _, wrapped = compute_maps(WRAPPERS[name](model), images, methods=METHODS)
    for one, other in zip(wrapped, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


class Scale(nn.Module):
    """Results with three axes, as tokens have them, before the transformer."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.flatten(2) + images.flatten(2) / 2).view_as(images)


def test_own_preprocessing_before_the_model_changes_no_map() -> None:
    model, images = build("timm")
    for before in (Scale(), nn.Sequential(nn.Conv2d(3, 3, 1), Scale())):
        whole = nn.Sequential(before, model).eval()
        inner = before(images).detach()
        _, _, expected = compute_maps(model, inner, methods=METHODS[:2])
        _, _, maps = compute_maps(whole, images, methods=METHODS[:2])
        for one, other in zip(maps, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
        # the model may be called without it
        with torch.no_grad(), capture_attention(whole) as record:
            whole(images)
            expected = record.attentions
            if not isinstance(before, nn.Sequential):
                model(inner)
        assert all(map(torch.equal, record.attentions, expected))


# peft asks for what Hugging Face has renamed
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("family", "modules"), [("timm", ["qkv", "fc1"]), ("hugging-face", ["q_proj", "v_proj"])]
)
def test_adapters_of_peft_have_the_maps_of_the_merged_model(
    family: str, modules: list[str]
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, images = build(family)
    config = peft.LoraConfig(target_modules=modules, r=2, init_lora_weights=False, lora_dropout=0.3)
    # maps are those of evaluation mode
    adapted = peft.get_peft_model(model, config).train()
    merged = copy.deepcopy(adapted).merge_and_unload()
    _, _, expected = compute_maps(merged, images, methods=METHODS)
    _, _, maps = compute_maps(adapted, images, methods=METHODS)
    for one, other in zip(maps, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_compiled_code_is_not_recorded() -> None:
    model, _ = build("timm")
    with (
        pytest.raises(ValueError, match="the model within"),
        capture_attention(compile_lazily(model)),
    ):
        pass
