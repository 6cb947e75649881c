"""The block's parts in numbers."""

import pytest
import torch
from torch import nn

from vit.model.blocks import Block, DropPath, LayerScale, Mlp


@torch.no_grad()
def test_mlps_by_hand():
    x = torch.tensor([[[-2.0, 1.0]]])
    identity = torch.eye(2)
    relu2 = Mlp(2, 2, activation="relu2")
    relu2.fc1.weight.copy_(identity)
    relu2.fc1.bias.copy_(torch.tensor([1.0, 2.0]))
    relu2.fc2.weight.copy_(identity)
    relu2.fc2.bias.zero_()
    torch.testing.assert_close(relu2(x), torch.tensor([[[0.0, 9.0]]]))

    swiglu = Mlp(2, 4, activation="swiglu")
    swiglu.fc1.weight.copy_(torch.cat([identity, 3 * identity]))
    swiglu.fc1.bias.zero_()
    swiglu.fc2.weight.copy_(identity)
    swiglu.fc2.bias.zero_()
    silu = [value / (1 + torch.tensor(-value).exp()) for value in (-2.0, 1.0)]
    torch.testing.assert_close(swiglu(x), torch.tensor([[[silu[0] * -6, silu[1] * 3]]]))

    gelu = Mlp(2, 2)
    gelu.load_state_dict(relu2.state_dict())
    values = torch.tensor([-1.0, 3.0])
    torch.testing.assert_close(gelu(x)[0, 0], values * torch.special.ndtr(values))


def test_unknown_and_impossible_mlps_are_refused():
    with pytest.raises(ValueError, match="unknown mlp 'tanh'; known: gelu, relu2, swiglu"):
        Mlp(8, 8, activation="tanh")
    with pytest.raises(ValueError, match="swiglu halves its hidden width, which is odd: 21"):
        Mlp(8, 21, activation="swiglu")


def test_what_is_off_is_not_there():
    block = Block(8, 2)
    off = (
        block.ls1,
        block.ls2,
        block.drop_path1,
        block.drop_path2,
        block.attn.q_norm,
        block.attn.k_norm,
    )
    assert all(type(part) is nn.Identity for part in off)


def test_layer_scale_multiplies_each_channel():
    scale = LayerScale(3, 0.5)
    scale.gamma.data[1] = 2
    torch.testing.assert_close(
        scale(torch.ones(1, 2, 3)), torch.tensor([0.5, 2.0, 0.5]).expand(1, 2, 3)
    )


class TestDropPath:
    def test_a_sample_s_branch_is_all_there_or_not_at_all_and_the_mean_stays(self):
        torch.manual_seed(0)
        drop = DropPath(0.25)
        branch = drop(torch.ones(4000, 3, 5))
        values = branch.flatten(1)
        assert values.unique().tolist() == pytest.approx([0, 4 / 3])
        assert torch.equal(values.min(1).values, values.max(1).values)
        assert values[:, 0].mean() == pytest.approx(1, abs=0.03)

    def test_evaluation_drops_nothing(self):
        tokens = torch.randn(4, 3, 5)
        assert torch.equal(DropPath(0.9).eval()(tokens), tokens)

    @pytest.mark.parametrize("rate", [-0.1, 1.0])
    def test_impossible_rates_are_refused(self, rate):
        with pytest.raises(ValueError, match=f"drop_path_rate {rate} is not a fraction"):
            DropPath(rate)


def test_a_dropped_sample_passes_the_block_unchanged():
    torch.manual_seed(3)
    block, tokens = Block(8, 2, drop_path=0.5), torch.randn(64, 3, 8)
    unchanged = (block(tokens) == tokens).flatten(1).all(1).float().mean()
    assert unchanged == pytest.approx(0.25, abs=0.15)  # both branches dropped
