"""In training the last block computes only the tokens that the head reads."""

import pytest
import torch

from vit.model.vision_transformer import VisionTransformer


@pytest.mark.parametrize(
    "arguments",
    [{}, {"reg_tokens": 2, "init_values": 0.1, "qk_norm": True}],
    ids=str,
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_leaving_out_unread_tokens_changes_neither_logits_nor_gradients(arguments, checkpointing):
    torch.manual_seed(0)
    model = VisionTransformer(16, 4, num_classes=5, embed_dim=32, depth=3, num_heads=2, **arguments)
    model.double().train()
    model.grad_checkpointing = checkpointing
    parameters = list(model.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter, std=0.2)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    logits = model(images)
    all_tokens = model.forward_head(model.forward_features(images))
    torch.testing.assert_close(logits, all_tokens, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(logits.square().sum(), parameters)
    expected = torch.autograd.grad(all_tokens.square().sum(), parameters)
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)


def test_last_block_moves_the_class_token_only_while_training():
    model = VisionTransformer(16, 4, num_classes=5, embed_dim=32, depth=2, num_heads=2)
    shapes = []
    model.blocks[-1].register_forward_hook(
        lambda module, arguments, output: shapes.append(output.shape)
    )
    model.train()(torch.randn(2, 3, 16, 16))
    model.eval()(torch.randn(2, 3, 16, 16))
    assert shapes == [(2, 1, 32), (2, 17, 32)]
