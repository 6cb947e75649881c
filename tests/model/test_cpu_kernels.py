"""The kernels of a CPU: exact derivatives, and what each undocumented door of torch does for
them."""

import jaxtyping
import pytest
import torch

from vit.model.cpu_kernels import SquaredReLU
from vit.model.patch_embed import PatchEmbed
from vit.model.vision_transformer import VisionTransformer


def test_the_squared_relu_written_out_is_the_derivative():
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SquaredReLU.apply, [hidden])
    assert torch.autograd.gradgradcheck(lambda inputs: SquaredReLU.apply(inputs)[0], [hidden])


def test_transforms_of_torch_func_give_the_gradients_of_training():
    """Without torch._C._are_functorch_transforms_active, a transform of a model in training mode
    raises an error about `setup_context`."""
    torch.manual_seed(0)
    model = VisionTransformer(
        8,
        4,
        num_classes=3,
        embed_dim=8,
        depth=1,
        num_heads=2,
        mlp="relu2",
        attention_backend="explicit",
    )
    model.double().train()
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1])
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def compute_loss(weights, image, label):
        logits = torch.func.functional_call(model, weights, image[None])
        return torch.nn.functional.cross_entropy(logits, label[None])

    per_sample = torch.func.vmap(torch.func.grad(compute_loss), (None, 0, 0))
    gradients = per_sample(weights, images, labels)
    for row in range(len(images)):
        loss = torch.nn.functional.cross_entropy(model(images[[row]]), labels[[row]])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        for found, gradient in zip(gradients.values(), expected, strict=True):
            torch.testing.assert_close(found[row], gradient, rtol=1e-12, atol=1e-15)

    def classify(image):
        return model(image[None])[0]

    jacobian = torch.func.jacrev(classify)(images[0])
    expected = torch.autograd.functional.jacobian(classify, images[0])
    torch.testing.assert_close(jacobian, expected)


def test_softmax_backward_data_rounds_as_autograd_does():
    """Without torch.ops.aten._softmax_backward_data, the formula in Python rounds to bfloat16
    several times, and training gives other weights."""
    torch.manual_seed(0)
    scores = torch.randn(8, 5, 5, dtype=torch.bfloat16, requires_grad=True)
    weights = scores.softmax(dim=-1)
    gradient = torch.randn_like(weights)
    (expected,) = torch.autograd.grad(weights, scores, gradient)
    weights = weights.detach()

    computed = torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)
    assert torch.equal(computed, expected)
    in_python = weights * (gradient - (gradient * weights).sum(dim=-1, keepdim=True))
    assert not torch.equal(in_python, expected)


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch._disable_dynamo is traced before")
# dynamo's own look, after a break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_disable_dynamo_keeps_a_stem_on_a_cpu_out_of_compiled_graphs(monkeypatch):
    """Without torch._disable_dynamo, max pooling is compiled for the CPU, where it takes longer
    than all the rest of a small model."""
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", True
    )  # checks of shapes break graphs
    graphs = []

    def record(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    embed = PatchEmbed(8, 4, in_chans=3, embed_dim=16, stem="conv_pool")
    images = torch.randn(2, 3, 8, 8)
    tokens = torch.compile(embed, backend=record)(images)
    torch.testing.assert_close(tokens, embed(images))
    assert graphs  # the rest is compiled
    assert not any("pool" in code or "conv" in code for code in graphs)
