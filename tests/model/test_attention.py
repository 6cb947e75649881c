"""Attention against loops in float64, numbers worked by hand, and torch's own layer."""

import itertools
import math

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vit.model.attention import (
    MultiHeadAttention,
    _can_use_cudnn,
    centre_keys,
    scaled_dot_product_attention,
)

torch.manual_seed(0)
PADDING = torch.tensor([[False, False, False, True, True], [False, False, False, False, False]])
MASKS = {
    "none": None,
    "key [B,1,1,Nk]": ~PADDING[:, None, None],
    "pair [B,1,Nq,Nk]": torch.rand(2, 1, 4, 5) > 0.4,
    "pair [Nq,Nk]": torch.rand(4, 5) > 0.4,
    "key [Nk]": torch.tensor([True, False, True, True, False]),
    "head [H,1,Nk]": torch.rand(3, 1, 5) > 0.4,
    "integers": (torch.rand(2, 1, 1, 5) > 0.4).int(),
    "bytes": (torch.rand(2, 1, 4, 5) > 0.4).byte(),
    "nothing for query 1": (torch.arange(4) != 1)[:, None],
}


def attend_by_loops(query, key, value, mask, *, causal):
    """Equation 1 of Vaswani et al. 2017, number by number."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    allowed = torch.ones(batch, heads, queries, keys).bool() if mask is None else mask.bool()
    allowed = allowed.expand(batch, heads, queries, keys)
    weights = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    output = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        seen = [j for j in range(keys) if allowed[b, h, i, j] and (not causal or j <= i)]
        scores = [
            math.fsum(float(query[b, h, i, k] * key[b, h, j, k]) for k in range(width))
            / math.sqrt(width)
            for j in seen
        ]
        total = math.fsum(math.exp(score) for score in scores)
        for j, score in zip(seen, scores, strict=True):
            weights[b, h, i, j] = math.exp(score) / total
            output[b, h, i] += weights[b, h, i, j] * value[b, h, j]
    return output, weights


def draw(*, queries=4, keys=5, width=6, value_width=7, dtype=torch.float64):
    shapes = [(2, 3, queries, width), (2, 3, keys, width), (2, 3, keys, value_width)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


class TestFormula:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("name", MASKS)
    def test_equals_loops_in_float64(self, name, causal):
        query, key, value = draw()
        expected = attend_by_loops(query, key, value, MASKS[name], causal=causal)
        actual = scaled_dot_product_attention(query, key, value, MASKS[name], causal=causal)
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


class TestMasks:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_query_with_nothing_to_attend_to_gives_zeros(self, dtype):
        layer = MultiHeadAttention(12, 3).to(dtype)
        tokens = torch.randn(2, 4, 12, dtype=dtype, requires_grad=True)
        mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
        mask[0, :, 1] = False
        output = layer(tokens, mask=mask)
        # no context: what is left is the output projection's bias
        torch.testing.assert_close(output[0, 1], layer.proj.bias, atol=0, rtol=0)
        output.float().square().sum().backward()
        gradients = [tokens.grad, *(parameter.grad for parameter in layer.parameters())]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert layer.forward_with_weights(tokens, mask=mask)[1][0, :, 1].abs().sum() == 0

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (torch.zeros(4, 5), r"boolean, True = attend, not torch.float32.*\(mask == 0\)"),
            (torch.ones(2, 1, 1, 4).bool(), r"expanded size"),
            (torch.ones(7, 2, 3, 4, 5).bool(), "the number of sizes provided"),
        ],
    )
    def test_unusable_masks_are_refused(self, mask, message):
        with pytest.raises((ValueError, RuntimeError), match=message):
            scaled_dot_product_attention(*draw(), mask)


def build_pair(*, bias=True):
    """torch's layer with random biases, and ours with its weights."""
    theirs = nn.MultiheadAttention(24, 3, bias=bias, batch_first=True)
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    ours = MultiHeadAttention(24, 3, qkv_bias=bias, proj_bias=bias)
    names = {"in_proj_": "qkv.", "out_proj.": "proj."}
    for their, our in names.items():
        for part in ["weight", "bias"][: 1 + bias]:
            ours.get_parameter(our + part).data = theirs.get_parameter(their + part).data.clone()
    return theirs, ours


class TestAgainstTorch:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("backend", ["fused", "explicit", "weights"])
    @pytest.mark.parametrize("case", ["self", "cross", "padded", "masked", "causal"])
    def test_forward_and_every_gradient_equal_multihead_attention(self, case, backend, bias):
        torch.manual_seed(1)
        theirs, ours = build_pair(bias=bias)
        ours.backend = "auto" if backend == "weights" else backend
        tokens = torch.randn(2, 5, 24)
        query = tokens if case in ("self", "padded", "causal") else torch.randn(2, 4, 24)
        inputs = [tensor.clone().requires_grad_() for tensor in (query, tokens, tokens.flip(0))]
        if case in ("self", "padded", "causal"):
            inputs = inputs[:1]
        pairs = torch.rand(4, 5) > 0.3
        padding = PADDING if case == "padded" else None
        blocked = ~pairs if case == "masked" else None
        triangle = ~torch.ones(5, 5).tril().bool() if case == "causal" else None
        expected, expected_weights = theirs(
            *(inputs * 3 if len(inputs) == 1 else inputs),
            key_padding_mask=padding,
            attn_mask=blocked if case == "masked" else triangle,
            average_attn_weights=False,
        )
        (expected.square().sum() / 40).backward()  # gradients of about one
        gradients = [tensor.grad.clone() for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None

        mask = {"padded": ~PADDING[:, None, None], "masked": pairs}.get(case)
        if backend == "weights":
            actual, weights = ours.forward_with_weights(*inputs, mask=mask, causal=case == "causal")
            torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)
        else:
            actual = ours(*inputs, mask=mask, causal=case == "causal")
        (actual.square().sum() / 40).backward()
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
        pairs = [
            (theirs.in_proj_weight, ours.qkv.weight),
            (theirs.out_proj.weight, ours.proj.weight),
        ]
        if bias:
            pairs += [(theirs.in_proj_bias, ours.qkv.bias), (theirs.out_proj.bias, ours.proj.bias)]
        for their, our in pairs:
            torch.testing.assert_close(our.grad, their.grad, atol=1e-6, rtol=0)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            torch.testing.assert_close(tensor.grad, gradient, atol=1e-6, rtol=0)


class TestLayer:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
    )
    @pytest.mark.parametrize("qk_norm", [False, True])
    def test_backends_agree(self, dtype, tolerance, qk_norm):
        torch.manual_seed(0)
        layer = MultiHeadAttention(48, 3, qk_norm=qk_norm).to(dtype)
        tokens = torch.randn(4, 65, 48, dtype=dtype)
        results = []
        for layer.backend in ("fused", "explicit"):
            inputs = tokens.clone().requires_grad_()
            output = layer(inputs)
            output.float().square().sum().backward()
            results.append((output, inputs.grad))
        torch.testing.assert_close(*(output for output, _ in results), atol=tolerance, rtol=0)
        torch.testing.assert_close(
            *(gradient for _, gradient in results), atol=tolerance, rtol=tolerance
        )
        with_weights = layer.forward_with_weights(tokens)[0]
        torch.testing.assert_close(with_weights, results[0][0], atol=tolerance, rtol=0)

    @pytest.mark.parametrize("backend", ["fused", "explicit"])
    @pytest.mark.parametrize("values", [None, torch.zeros(2, 6, 12)])
    def test_cross_attention_needs_a_value_for_each_key(self, monkeypatch, backend, values):
        """torch's kernel reads outside of tensors of other lengths."""
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        tokens = torch.randn(2, 5, 12)
        with pytest.raises(ValueError, match="as many values"):
            MultiHeadAttention(12, 3, backend=backend)(tokens, tokens, values)


# The largest score for which cuDNN's backward pass is NaN: -ln of float32's largest number.
NAN_BELOW = -88.7


def draw_low_scores(dtype):
    """Queries, keys and values of 64 tokens whose scores are all near -120."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 64, 64, dtype=torch.float64) for _ in range(3))
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = 1.0, -960.0
    return [part.to(dtype).requires_grad_() for part in (query, key, value)]


def list_row_totals(query, key):
    """The logarithm of the sum of exponentials of each row."""
    return (query.double() @ key.double().mT / 8).logsumexp(dim=-1)


def test_centred_keys_give_the_same_attention():
    results = []
    for centre in (lambda key: key, centre_keys):
        query, key, value = inputs = draw_low_scores(torch.float64)
        output = scaled_dot_product_attention(query, centre(key), value)[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 30])
def test_no_row_of_centred_keys_is_far_below_zero(dtype, size):
    query, key, _ = draw_low_scores(dtype)
    query = size * query
    assert list_row_totals(query, key).max() < NAN_BELOW
    # what rounding moves the mean score by
    moved = 0.0 if dtype == torch.float64 else 2**-8 * size * 64
    assert list_row_totals(query, centre_keys(key)).min() > math.log(64) - moved


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_keys_are_centred_where_attention_is_in_half_precision_on_a_gpu(precision):
    """Traced on tensors without memory; norms of keys leave float32 for autocast to convert."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    # torch.autocast turns itself off without a GPU
    torch.set_autocast_enabled("cuda", precision == "autocast")
    try:
        for device in ("cuda", "cpu"):
            with FakeTensorMode():
                key = torch.empty(2, 3, 5, 4, dtype=dtype, device=device)
            assert _can_use_cudnn(key) == (device == "cuda" and precision != "float32")
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("case", ["self", "first token"])
def test_a_kernel_that_may_be_cudnns_gets_centred_keys(monkeypatch, case):
    """In a loop of the user's own too: nobody calls `choose_device` here."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3, backend="fused").double()
    tokens = torch.randn(2, 5, 12, dtype=torch.float64)
    arguments = (tokens[:, :1], tokens, tokens) if case == "first token" else (tokens,)
    attend = F.scaled_dot_product_attention
    keys = []

    def watch(query, key, value):
        keys.append(key)
        return attend(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    expected = layer(*arguments)
    monkeypatch.setattr("vit.model.attention._can_use_cudnn", lambda key: True)
    found = layer(*arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert keys[0].mean(dim=-2).abs().max() > 1e-3
    assert keys[1].mean(dim=-2).abs().max() < 1e-15
