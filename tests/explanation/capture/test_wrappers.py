"""What is put around or into a model changes no map, or is refused in a sentence."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.explanation.model_zoo import build
from vit.explanation.capture.forward import capture_attention, run_forward
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.rollout import attention_rollout

METHODS = ("rollout", "gae", "libra-removal")
NUM_PROMPTS = 5


class Output(nn.Module):
    """A model whose output is `change` of the inner one's."""

    def __init__(self, model: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, images: Tensor) -> Any:
        return self.change(self.model(images))


class Prompted(nn.Module):
    """Visual prompt tuning (Jia et al. 2022) of a timm model: learnt tokens after the class token;
    `deep` ones replace them before each block."""

    def __init__(self, model: Any, *, deep: bool = False) -> None:
        super().__init__()
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.prompts = nn.Parameter(torch.randn(3, NUM_PROMPTS, 24, generator=generator))
        self.deep = deep

    def embed(self, images: Tensor) -> Tensor:
        tokens = self.model._pos_embed(self.model.patch_embed(images))
        prompts = self.prompts[0].expand(len(tokens), -1, -1)
        return torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], dim=1)

    def classify(self, tokens: Tensor) -> Tensor:
        for number, block in enumerate(self.model.blocks):
            if self.deep and number > 0:
                prompts = self.prompts[number].expand(len(tokens), -1, -1)
                tokens = torch.cat([tokens[:, :1], prompts, tokens[:, 1 + NUM_PROMPTS :]], dim=1)
            tokens = block(tokens)
        return self.model.forward_head(self.model.norm(tokens))

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.embed(images))


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
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-7)


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
        torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-6)


def test_prompts_are_prefix_tokens() -> None:
    model, images = build("timm")
    prompted = Prompted(model).eval()
    forward, _, (maps,) = compute_maps(prompted, images)
    assert (forward.num_prefix_tokens, forward.grid) == (1 + NUM_PROMPTS, (4, 6))
    rollout = attention_rollout(forward.record.attentions)[:, 0]
    torch.testing.assert_close(maps.values[:, 0].flatten(1), rollout[:, 1 + NUM_PROMPTS :])


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_prompts_that_a_hook_adds_are_pooled_as_the_model_pools(pool: str) -> None:
    """timm's own model, which takes all but its own class token for patches."""
    model, images = build("timm")
    model.global_pool = pool
    prompts = torch.randn(1, NUM_PROMPTS, 24, generator=torch.Generator().manual_seed(0))
    model.norm_pre.register_forward_hook(
        lambda module, args, tokens: torch.cat(
            [tokens[:, :1], prompts.expand(len(tokens), -1, -1), tokens[:, 1:]], dim=1
        )
    )
    forward = run_forward(model, images)
    assert forward.num_prefix_tokens == 1 + NUM_PROMPTS
    expected = torch.zeros(2, 25 + NUM_PROMPTS)
    if pool == "token":
        expected[:, 0] = 1
    else:
        expected[:, 1:] = 1 / (24 + NUM_PROMPTS)
    torch.testing.assert_close(forward.pool_weights, expected)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "deep prompts": (
        lambda: Prompted(build("timm")[0], deep=True),
        rf"{NUM_PROMPTS} of 30 tokens after model\.blocks\.0\.attn don't contain",
    ),
    "two tensors": (
        lambda: Output(build("timm")[0], lambda logits: (logits, logits[:, :2])),
        "doesn't return logits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_in_a_sentence(name: str) -> None:
    create, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compute_maps(create().eval(), build("timm")[1], methods=METHODS)


def test_compiled_code_is_not_recorded() -> None:
    model, _ = build("timm")
    with (
        pytest.raises(ValueError, match="the model within"),
        capture_attention(compile_lazily(model)),
    ):
        pass
