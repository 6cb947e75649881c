"""Taking patches away: what is kept is exactly what the encoder sees."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.explanation.keep_tokens import keep_tokens
from vit.analysis.faithfulness.gains import build_probability
from vit.explanation.checks.token_ablation import build_removal

Build = Callable[..., tuple[nn.Module, Tensor]]


def test_images_of_rotary_models_are_painted_over_instead(build: Build) -> None:
    model, images = build("timm-eva")
    classes = torch.tensor([0, 1])
    auto = build_probability(build_removal(model, images, grid=(4, 4)), classes)
    mean = build_probability(build_removal(model, images, grid=(4, 4), fill="mean"), classes)
    kept = torch.arange(8).expand(2, -1)
    assert torch.equal(auto(kept), mean(kept))


@pytest.mark.parametrize(
    "family", ["ours", "ours-avg", "ours-registers-norms", "timm", "torchvision", "hugging-face"]
)
def test_images_embedded_once_give_the_answers_of_whole_forward_passes(
    build: Build, family: str
) -> None:
    """Several removals of each image, more rows than a batch takes, beside one forward pass of each
    with `keep_tokens`."""
    model, images = build(family)
    rows, columns = {"torchvision": (4, 4), "hugging-face": (4, 4)}.get(family, (4, 6))
    compute_kept = build_removal(model, images, grid=(rows, columns), batch_size=1)
    generator = torch.Generator().manual_seed(0)
    kept = torch.stack([torch.randperm(rows * columns, generator=generator)[:7] for _ in range(6)])
    classes = torch.tensor([0, 1] * 3)
    found = compute_kept(classes, kept).softmax(dim=1)[torch.arange(6), classes]
    for removal in range(3):
        with torch.no_grad(), keep_tokens(model, kept[2 * removal : 2 * removal + 2], images):
            output = model(images)
        expected = getattr(output, "logits", output).softmax(dim=1).diagonal()
        assert (found[2 * removal : 2 * removal + 2] - expected).abs().max() < 1e-5
    assert (found[:2] - found[2:4]).abs().max() > 1e-3


def test_painting_leaves_kept_patches_their_pixels(ours: Build) -> None:
    model, images = ours()
    seen: list[Tensor] = []
    predict = build_probability(
        build_removal(model, images, grid=(4, 6), fill="mean"), torch.tensor([0, 1])
    )
    handle = model.patch_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    predict(torch.tensor([[7], [0]]))
    handle.remove()
    assert torch.equal(
        seen[0][0, :, 8:16, 8:16], images[0, :, 8:16, 8:16]
    )  # patch 7: row 1, column 1 of 8 px
    assert (seen[0][0, :, :8, :8] - images[0, :, :8, :8]).abs().max() > 0.1
    assert torch.equal(seen[0][1, :, :8, :8], images[1, :, :8, :8])
    assert torch.isfinite(seen[0]).all()
