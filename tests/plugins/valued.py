"""A package that adds a map method: how large the values of each token are in one layer."""

import torch

import vit


def compute_value_norms(forward, classes, *, layer: int = -1):
    with torch.no_grad():
        return forward.record.layers[layer].value_norms().sum(dim=1)


METHOD = vit.Method(
    name="value-norms",
    title="norms of values",
    compute=compute_value_norms,
    class_specific=False,
)
