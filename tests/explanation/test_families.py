"""Models of many families have the maps that the table in docs/explanations/supported-models.md says, and these are
the ones worked out by hand, in float64."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.explanation.family_zoo import FAMILIES, Family, describe_family, name_family
from vit.explanation.capture.forward import run_forward, settle_source
from vit.explanation.capture.reader import ModelReader
from vit.explanation.methods.gradients import compute_difference_x_gradient, compute_grad_cam
from vit.model.logits import compute_logits

CLASS = 3
PAGE = Path(__file__).parents[2] / "docs" / "explanations" / "supported-models.md"
_QUICK = ("levit_conv_128s", "cait_xxs24_224", "tnt_s_patch16_224", "swin_tiny_patch4_window7_224")
_QUICK += ("SegformerForImageClassification",)
PARAMETERS = [
    pytest.param(
        family, id=family.name, marks=() if family.name in _QUICK else pytest.mark.extended
    )
    for family in FAMILIES
]


def draw_image(family: Family) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (1, 3, family.size, family.size)
    return torch.randn(size, generator=generator).double()


def arrange(output: object, family: Family) -> Tensor:
    """Return a layer's output as [B, C, rows, columns], as the user of a library of Grad-CAM would
    write it for this layer."""
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    match family.order:
        case "channels first":
            return tensor
        case "channels last":
            return tensor.permute(0, 3, 1, 2)
        case "tokens":
            tokens = tensor
        case "1 and tokens":
            tokens = tensor[:, 1:]
    side = round(tokens.shape[1] ** 0.5)
    return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", PARAMETERS)
def test_maps_are_those_worked_out_by_hand(family: Family) -> None:
    model = family.make().double()
    reader = ModelReader(model)
    image = draw_image(family)
    settle_source(reader, image)
    if reader.source != "attention":
        assert reader.source == ("feature map" if family.layer else "pixels")
    forward = run_forward(reader, image, gradients=True)
    classes = torch.tensor([CLASS])
    (found,) = compute_difference_x_gradient(forward, classes)

    # by plain autograd
    outputs = []
    if family.layer:
        layer = model.get_submodule(family.layer)
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    pixels = image.clone().requires_grad_()
    logit = compute_logits(model, pixels)[0, CLASS]
    (gradient,) = torch.autograd.grad(logit, pixels, retain_graph=True)
    rows, columns = forward.grid
    even = image - image.mean(dim=(-2, -1), keepdim=True)
    product = (gradient * even).sum(dim=(0, 1))
    parts = product.reshape(rows, family.size // rows, columns, family.size // columns)
    found = found[forward.num_prefix_tokens :]
    assert_close(found, parts.sum(dim=(1, 3)).flatten(), size=parts.abs().sum(dim=(1, 3)))
    if reader.source != "feature map":
        return

    # weights = mean of the gradients over the places; relu(Σ weights · activations)
    output = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    (slope,) = torch.autograd.grad(logit, output)
    terms = arrange(slope, family).mean(dim=(2, 3), keepdim=True) * arrange(output, family)
    (found,) = compute_grad_cam(forward, classes)
    expected = terms.sum(dim=1).clamp_min(0).flatten().detach()
    assert_close(found, expected, size=terms.abs().sum(dim=1))


def assert_close(found: Tensor, expected: Tensor, *, size: Tensor) -> None:
    """Compare sums whose terms have this size and may cancel."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(size.max()))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", [one for one in PARAMETERS if one.values[0].has_local_places])
def test_a_bright_corner_is_seen_in_that_corner(family: Family) -> None:
    """Of all places of the layer, one in the quarter of the corner changes most."""
    model = family.make().double()
    image = draw_image(family)
    side = family.size // 4
    images = image.repeat(5, 1, 1, 1)
    corners = [(slice(side), slice(side)), (slice(side), slice(-side, None))]
    corners += [(slice(-side, None), slice(side)), (slice(-side, None), slice(-side, None))]
    for number, (rows, columns) in enumerate(corners, start=1):
        images[number, :, rows, columns] += 2
    outputs: list[object] = []
    layer = model.get_submodule(family.layer)
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        compute_logits(model, images)
    places = arrange(outputs[-1], family)
    change = (places[1:] - places[:1]).norm(dim=1)
    change = change / change.mean(dim=0)  # some places change more with anything
    half = [size // 2 for size in change.shape[1:]]
    for number, seen in enumerate(change):
        row, column = divmod(int(seen.argmax()), seen.shape[1])
        assert row < -(-seen.shape[0] // 2) if number < 2 else row >= half[0]
        assert column < -(-seen.shape[1] // 2) if number % 2 == 0 else column >= half[1]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", PARAMETERS)
def test_the_page_has_its_row(family: Family) -> None:
    start = f"| {describe_family(family)} |"
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = (row for row in rows if row.startswith(start))
    (names,) = re.findall(rf"{family.library}: ([^;|]*)", row)
    assert name_family(family) in names.strip().split(", ")
