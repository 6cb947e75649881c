"""Attention rollout as part of the model's own computation, without hooks: a module that exporters can trace."""

from torch import Tensor, nn

from vit.explanation.capture.pooling import compute_readout
from vit.explanation.capture.readout import split_prefix
from vit.explanation.methods.rollout import attention_rollout
from vit.model.vision_transformer import Images, VisionTransformer


class LogitsAndRollout(nn.Module):
    """Logits [B, classes] and the maps [B, rows, columns] of the method rollout with its default options."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Images) -> tuple[Tensor, Tensor]:
        model = self.model
        tokens, attentions = model.forward_features_with_attention(images)
        readout = compute_readout(model, tokens, {}, num_prefix_tokens=model.num_prefix_tokens)
        row = attention_rollout(attentions, readout=readout)
        maps, _ = split_prefix(row, num_prefix_tokens=model.num_prefix_tokens, grid=model.grid_size)
        return model.forward_head(tokens), maps
