"""The model of this folder for transformers, which has no such architecture.

AutoModelForImageClassification.from_pretrained("FOLDER", trust_remote_code=True)
pipeline("image-classification", model="FOLDER", trust_remote_code=True)
"""

import torch.nn.functional as F
from torch import nn
from transformers import ImageClassificationPipeline, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from .timm_vit import build

MULTILABEL = "multi_label_classification"


class ViTConfig(PretrainedConfig):
    model_type = "vit_with_stem"


class ViTModel(PreTrainedModel):
    """Gives the tokens after the last norm, and the features that the classifier reads."""

    config_class = ViTConfig
    main_input_name = "pixel_values"
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"^vit\.head"]  # noqa: RUF012 transformers 4 adds a list

    def __init__(self, config, num_classes=0):
        super().__init__(config)
        self.vit = build(**{**config.arguments, "num_classes": num_classes})
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):  # a classifier for other classes
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self):
        return self.vit.patch_embed

    def forward(
        self,
        pixel_values,
        labels=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **unused,
    ):
        vit, config, states, attentions = self.vit, self.config, [], []
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        tokens = vit._pos_embed(vit.patch_embed(pixel_values))
        for block in vit.blocks:
            states.append(tokens)
            if output_attentions:
                attentions.append(compute_weights(block, tokens))
            block.attn.fused_attn = config._attn_implementation != "eager"
            tokens = block(tokens)
        output = self._read(vit.norm(tokens), labels)
        if output_hidden_states:
            output["hidden_states"] = (*states, tokens)
        if output_attentions:
            output["attentions"] = tuple(attentions)
        is_tuple = return_dict is False or not getattr(config, "return_dict", True)
        return output.to_tuple() if is_tuple else output

    def _read(self, tokens, labels):
        pooled = self.vit.forward_head(tokens, pre_logits=True)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)


class ViTForImageClassification(ViTModel):
    _keys_to_ignore_on_load_unexpected = None

    def __init__(self, config):
        super().__init__(config, config.num_labels)

    def _read(self, tokens, labels):
        logits, loss = self.vit.forward_head(tokens), None
        if labels is not None and self.config.problem_type == MULTILABEL:
            loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        elif labels is not None:
            loss = F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def compute_weights(block, tokens):
    """Compute the attention [B, H, N, N] of a block of timm's that reads these tokens."""
    attention = block.attn
    packed = attention.qkv(block.norm1(tokens))
    packed = packed.unflatten(-1, (3, attention.num_heads, attention.head_dim))
    query, key, _ = packed.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, K] each
    query, key = attention.q_norm(query) * attention.scale, attention.k_norm(key)
    return (query @ key.transpose(-2, -1)).softmax(dim=-1)


class ViTPipeline(ImageClassificationPipeline):
    """Passes images on as they are: the library's own pipeline converts them to RGB first, which cuts
    16-bit grey off at 255 and drops transparency. Where thresholds decide, "predicted" says so for each
    label or class, and the predicted class comes first."""

    def preprocess(self, image, timeout=None):
        return self.image_processor(image, return_tensors="pt").to(self.dtype)

    def postprocess(self, outputs, function_to_apply=None, top_k=5):
        config = self.model.config
        rows = super().postprocess(outputs, function_to_apply, config.num_labels)
        thresholds = (getattr(config, "operating_point", None) or {}).get("thresholds", {})
        if config.problem_type == MULTILABEL:
            for row in rows:
                row["predicted"] = row["score"] >= thresholds.get(row["label"], 0.5)
        elif thresholds:
            ((name, threshold),) = thresholds.items()
            others = [row for row in rows if row["label"] != name]
            (chosen,) = [row for row in rows if row["label"] == name]
            if chosen["score"] < threshold:
                chosen = others[0]
            rows.sort(key=lambda row: row is not chosen)
            rows = [{**row, "predicted": row is chosen} for row in rows]
        return rows[:top_k]
