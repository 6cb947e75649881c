"""The block's parts in numbers."""

import pytest
import torch

from vit.model.blocks import DropPath, Mlp


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

    gelu = Mlp(2, 2)
    gelu.load_state_dict(relu2.state_dict())
    values = torch.tensor([-1.0, 3.0])
    torch.testing.assert_close(gelu(x)[0, 0], values * torch.special.ndtr(values))


class TestDropPath:
    def test_a_sample_s_branch_is_all_there_or_not_at_all_and_the_mean_stays(self):
        torch.manual_seed(0)
        drop = DropPath(0.25)
        branch = drop(torch.ones(4000, 3, 5))
        values = branch.flatten(1)
        assert values.unique().tolist() == pytest.approx([0, 4 / 3])
        assert torch.equal(values.min(1).values, values.max(1).values)
        assert values[:, 0].mean() == pytest.approx(1, abs=0.03)
