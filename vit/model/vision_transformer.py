"""The vision transformer on one page: image → patch tokens → encoder blocks → features → logits.

Dosovitskiy et al. 2021, "An image is worth 16×16 words". Arguments and parameters have timm's
names, so that its weights load as they are.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.model.attention import Backend, MultiHeadAttention, build_norm
from vit.model.blocks import Block, Mlp, drop_patches
from vit.model.patch_embed import PatchEmbed, build_sincos_positions, resample_positions
from vit.runtime.arguments import Size, as_pair, check_choice
from vit.runtime.tensors import Images, Logits, Tokens

Architecture = dict[str, Any]  # the arguments of a VisionTransformer, by name


class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021).

    Args:
        img_size: Pixels of both sides, or (height, width); the patch must divide the image.
        patch_size: See `img_size`.
        in_chans: Channels of the images.
        num_classes: 0 gives the pooled features instead of logits.
        embed_dim: Width of the tokens, D.
        depth: Number of blocks, L.
        num_heads: Attention heads, H, which divide the width.
        mlp_ratio: Width of the MLP's hidden layer in units of embed_dim.
        mlp: Activation of the MLP; see `Mlp`.
        qkv_bias: Give the projections to queries, keys and values biases.
        qk_norm: LayerNorm of each head's queries and keys (Dehghani et al. 2023).
        init_values: Initial value of LayerScale. None: no LayerScale.
        global_pool: "token" reads the class token, "avg" the mean of the patches.
        class_token: Add a class token. None: add one if the head reads it.
        fc_norm: Apply the last norm after the pooling. None: with "avg", as in timm.
        stem: "patch", or a convolutional one; see `build_stem`.
        pos_embed: "learned", or fixed 2-D "sincos".
        no_embed_class: Give the prefix tokens no positions. "sincos" never does.
        reg_tokens: Number of registers, 0 to 8 (Darcet et al. 2024).
        drop_path_rate: Rate of the last block; it grows linearly from 0 at the first.
        attention_backend: See `MultiHeadAttention`.

    Raises:
        ValueError: Values are out of range or contradict each other.

    Attributes:
        architecture: The arguments. `VisionTransformer(**architecture)` is the same model,
            untrained.
        patch_drop_rate: Fraction of each image's patches that a training step leaves out.
        grad_checkpointing: Recompute each block's activations in the backward pass.
        num_frozen_blocks: Number of first blocks that `freeze` excludes from training.

    Example:
        >>> model = vit.VisionTransformer(img_size=32, patch_size=4, num_classes=10)
        >>> model(torch.randn(8, 3, 32, 32))  # logits [8, 10]
    """

    pos_embed: Tensor

    def __init__(
        self,
        img_size: Size = 224,
        patch_size: Size = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        *,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        mlp: str = "gelu",
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        global_pool: str = "token",
        class_token: bool | None = None,
        fc_norm: bool | None = None,
        stem: str = "patch",
        pos_embed: str = "learned",
        no_embed_class: bool = False,
        reg_tokens: int = 0,
        drop_path_rate: float = 0.0,
        attention_backend: Backend = "auto",
    ) -> None:
        img_size = as_pair(img_size, name="img_size")
        patch_size = as_pair(patch_size, name="patch_size")
        if class_token is None:
            class_token = global_pool == "token"
        if fc_norm is None:
            fc_norm = global_pool == "avg"
        no_embed_class = no_embed_class or pos_embed == "sincos"
        arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        super().__init__()
        self.architecture: Architecture = arguments
        check_choice(global_pool, ("avg", "token"), name="global_pool")
        check_choice(pos_embed, ("learned", "sincos"), name="pos_embed")
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool='token' reads the class token; use global_pool='avg'")

        # timm's models have these attributes too.
        self.embed_dim = embed_dim
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_prefix_tokens = class_token + reg_tokens
        self.num_embedded_prefix_tokens = self.num_prefix_tokens * (not no_embed_class)
        self.patch_drop_rate = 0.0
        self.grad_checkpointing = False
        self.num_frozen_blocks = 0

        # pixels → tokens
        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans=in_chans, embed_dim=embed_dim, stem=stem
        )
        self.cls_token = _empty_tokens(int(class_token), embed_dim)
        self.reg_token = _empty_tokens(reg_tokens, embed_dim)
        num_positions = self.num_embedded_prefix_tokens + math.prod(self.grid_size)
        if pos_embed == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, num_positions, embed_dim))
        else:
            positions = build_sincos_positions(self.grid_size, embed_dim)
            self.register_buffer("pos_embed", positions, persistent=False)

        # tokens → tokens
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                MultiHeadAttention(
                    embed_dim,
                    num_heads,
                    qkv_bias=qkv_bias,
                    qk_norm=qk_norm,
                    backend=attention_backend,
                ),
                Mlp(embed_dim, round(embed_dim * mlp_ratio), activation=mlp),
                init_values=init_values,
                drop_path=drop_path_rate * layer / max(depth - 1, 1),
            )
            for layer in range(depth)
        )
        # tokens → logits, with one norm before the pooling or after it
        self.norm = build_norm(embed_dim, enabled=not fc_norm)
        self.fc_norm = build_norm(embed_dim, enabled=fc_norm)
        self.head = self._build_head()
        init_weights(self)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches: the shape of an attention map."""
        return self.patch_embed.grid_size

    @property
    def num_out_tokens(self) -> int | None:
        """Number of leading tokens that the head reads, None for all. The last block can skip the
        others, with the same logits and gradients."""
        if self.global_pool == "token":
            return 1
        return None

    def forward(self, images: Images | Tokens) -> Logits:
        """Compute logits, or features if num_classes is 0, from normalised images or from tokens of
        `forward_frozen`."""
        num_out_tokens = None
        if self.training:  # In evaluation mode, hooks may need every token.
            num_out_tokens = self.num_out_tokens
        return self.forward_head(self.forward_features(images, num_out_tokens=num_out_tokens))

    def forward_features(
        self, images: Images | Tokens, *, num_out_tokens: int | None = None
    ) -> Float[Tensor, "B M D"]:
        """Compute the tokens after the final norm: prefix tokens, then patches row by row.

        Args:
            images: Normalised images, or tokens of `forward_frozen`.
            num_out_tokens: Number of leading tokens to return. None returns all.
        """
        tokens, first = images, self.num_frozen_blocks
        if images.ndim == 4:
            tokens, first = self._embed(images), 0
        if self.training and self.patch_drop_rate:
            tokens = drop_patches(
                tokens, self.patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens
            )
        for layer in range(first, len(self.blocks)):
            block = self.blocks[layer]
            num_kept = num_out_tokens if layer == len(self.blocks) - 1 else None
            if self.grad_checkpointing and torch.is_grad_enabled():
                # by the compiled method if there is one now
                run = vars(block).get("forward", block)
                tokens = checkpoint(run, tokens, num_out_tokens=num_kept, use_reentrant=False)
            else:
                tokens = block(tokens, num_out_tokens=num_kept)
        normed: Tensor = self.norm(tokens)
        return normed

    def forward_frozen(self, images: Images) -> Tokens:
        """Compute the tokens after the frozen blocks. `forward` takes them instead of images."""
        tokens = self._embed(images)
        for layer in range(self.num_frozen_blocks):
            tokens = self.blocks[layer](tokens)
        return tokens

    def forward_head(self, tokens: Tokens) -> Logits:
        """Pool the tokens of `forward_features` and classify."""
        logits: Tensor = self.head(self.pool(tokens, self.global_pool))
        return logits

    def pool(self, tokens: Tokens, global_pool: str) -> Float[Tensor, "B D"]:
        """Pool the tokens of `forward_features`: the class token, or with "avg" the mean of the
        patches."""
        pooled = tokens[:, 0]
        if global_pool == "avg":
            pooled = tokens[:, self.num_prefix_tokens :].mean(dim=1)
        normed: Tensor = self.fc_norm(pooled)
        return normed

    def forward_intermediates(self, images: Images) -> Iterator[Tokens]:
        """Yield the tokens after each block, first block first, before the final norm."""
        tokens = self._embed(images)
        for block in self.blocks:
            tokens = block(tokens)
            yield tokens

    def forward_with_attention(
        self, images: Images
    ) -> tuple[Logits, list[Float[Tensor, "B H N N"]]]:
        """Return the logits and the attention of every layer, first layer first."""
        tokens = self._embed(images)
        attentions = []
        for block in self.blocks:
            assert isinstance(block, Block)
            tokens, weights = block.forward_with_weights(tokens)
            attentions.append(weights)
        return self.forward_head(self.norm(tokens)), attentions

    def set_input_size(self, img_size: Size) -> None:
        """Change the size of the images: pixels of both sides, or (height, width).

        Learned positions are resampled into a new parameter, so build the optimizer afterwards.
        Raises ValueError if the patches don't divide the image.
        """
        old_grid = self.grid_size
        self.patch_embed.set_input_size(img_size)
        self.architecture["img_size"] = self.patch_embed.img_size
        if self.grid_size == old_grid:
            return
        if isinstance(self.pos_embed, nn.Parameter):
            positions = self._resample_positions(self.grid_size, old_grid).detach()
            self.pos_embed = nn.Parameter(positions, requires_grad=self.pos_embed.requires_grad)
        else:
            positions = build_sincos_positions(self.grid_size, self.embed_dim)
            self.pos_embed = positions.to(self.pos_embed)

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by an untrained one."""
        self.num_classes = num_classes
        self.architecture["num_classes"] = num_classes
        self.head = self._build_head()

    def freeze(self, part: Literal["backbone"] | int) -> None:
        """Exclude a part of the model from training: "backbone", all but the head, or for a number
        n the embeddings and the first n blocks. Raises ValueError if there are fewer."""
        self.requires_grad_(False)
        trained = [self.head]
        if part != "backbone":
            if not 0 <= part <= len(self.blocks):
                raise ValueError(f"freeze {part}: the model has {len(self.blocks)} blocks")
            trained += [self.norm, self.fc_norm, *self.blocks[part:]]
            self.num_frozen_blocks = part
        for module in trained:
            module.requires_grad_(True)

    def _build_head(self) -> nn.Module:
        if not self.num_classes:
            return nn.Identity()
        head = nn.Linear(self.embed_dim, self.num_classes)
        init_weights(head)
        return head.to(next(self.parameters()))

    def _resample_positions(self, grid: tuple[int, int], old_grid: tuple[int, int]) -> Tensor:
        return resample_positions(
            self.pos_embed,
            old_grid=old_grid,
            new_grid=grid,
            num_prefix_tokens=self.num_embedded_prefix_tokens,
        )

    def _embed(self, images: Images) -> Tokens:
        """Embed the patches, add positions, and put the prefix tokens first."""
        tokens: Tensor = self.patch_embed(images)
        # In training, images may have another size.
        height, width = images.shape[2:]
        rows, columns = self.patch_embed.patch_size
        positions = self._resample_positions((height // rows, width // columns), self.grid_size)
        if not self.num_embedded_prefix_tokens:
            tokens = tokens + positions

        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if prefix:
            expanded = [token.expand(tokens.shape[0], -1, -1) for token in prefix]
            tokens = torch.cat([*expanded, tokens], dim=1)  # [B, prefix + P, D]
        if self.num_embedded_prefix_tokens:
            tokens = tokens + positions
        return tokens


def _empty_tokens(count: int, embed_dim: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(1, count, embed_dim)) if count else None


@torch.no_grad()
def init_weights(module: nn.Module) -> None:
    """Draw initial weights as DeiT and timm do.

    Linear maps and learned positions are truncated normal with σ = 0.02, biases are zero, tokens
    are near zero. Convolutions are normal with a variance that keeps the scale of the signal (LeCun
    et al. 1998, before ReLU He et al. 2015).
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # "meta" has no values, and drawing them would import torch's compiler (3 s)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        elif isinstance(layer, nn.Conv2d):
            gain = 1.0 if name.endswith("patch_embed.proj") else 2.0
            nn.init.normal_(layer.weight, std=(gain / layer.weight[0].numel()) ** 0.5)
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    for name, parameter in module.named_parameters(recurse=False):
        if name == "pos_embed":
            nn.init.trunc_normal_(parameter, std=0.02)
        elif name.endswith("_token"):
            nn.init.normal_(parameter, std=1e-6)
