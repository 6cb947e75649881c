"""Into how many micro-batches a batch is split."""

import pytest
import torch

from vit.model.vision_transformer import VisionTransformer
from vit.training.estimate import choose_grad_accum_steps


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("size", "patch", "width", "batch", "steps"),
    [(32, 4, 192, 256, 4), (32, 4, 128, 256, 3), (8, 4, 16, 64, 1), (224, 16, 768, 32, 7), (224, 16, 768, 1, 1)],
)
def test_a_micro_batchs_widest_activation_takes_three_mebibytes_a_thread(size, patch, width, batch, steps):
    model = VisionTransformer(size, patch, num_classes=10, embed_dim=width, depth=1, num_heads=2)
    assert (
        choose_grad_accum_steps(model, batch_size=batch, image_size=(size, size), device=torch.device("cpu")) == steps
    )
    tokens = (size // patch) ** 2
    if steps > 1:
        assert -(-batch // steps) * tokens * 4 * width * 2 <= 6 * 2**20


def test_other_devices_take_the_batch_whole():
    with torch.device("meta"):
        model = VisionTransformer(224, 16, num_classes=10)
    assert choose_grad_accum_steps(model, batch_size=1024, image_size=(224, 224), device=torch.device("cuda")) == 1
