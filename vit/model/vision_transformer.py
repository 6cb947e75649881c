"""The vision transformer on one page: image → patch tokens → encoder blocks → pooled features → logits.

Dosovitskiy et al. 2021, "An image is worth 16×16 words". Names of arguments and parameters are timm's, so that its
weights load as they are.
"""

from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.model.attention import NORM_EPS, Backend
from vit.model.encoder import Block, Tokens, drop_patches
from vit.model.patch_embed import PatchEmbed, Size, build_sincos_positions, resample_positions
from vit.runtime.arguments import as_pair, check_choice

Images = Float[Tensor, "B C height width"]
Logits = Float[Tensor, "B classes"]


class VisionTransformer(nn.Module):
    """img_size and patch_size: one number or (height, width); the patch must divide the image.
    num_classes: 0 gives the pooled features instead of logits.
    global_pool: "token" reads the class token; "avg" and "max" reduce over the patches; "attention" averages them
    with learned weights (CCT's sequence pooling). class_token: None adds one exactly when it is read.
    fc_norm: the last norm comes after the pooling, not before; None: with "avg" and "max", as in timm.
    pos_embed: "learned", fixed 2-D "sincos" or "none"; no_embed_class: none for the prefix tokens.
    reg_tokens: 0-8 registers (Darcet et al. 2024). distilled: DeiT's second token and head, averaged.
    init_values: LayerScale's initial value; None: no LayerScale. drop_path_rate: the last block's, from 0 at the first.

    `architecture` holds the arguments: VisionTransformer(**model.architecture) is the same model, untrained.
    """

    pos_embed: Tensor | None

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
        distilled: bool = False,
        drop_path_rate: float = 0.0,
        attention_backend: Backend = "auto",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.architecture = _resolve(arguments)
        self.embed_dim, self.num_classes, self.global_pool = embed_dim, num_classes, global_pool
        self.grad_checkpointing = False
        self.patch_drop_rate = 0.0  # of an image's patches, at random; in training mode only
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans=in_chans, embed_dim=embed_dim, stem=stem)
        has_class_token, fc_norm = self.architecture["class_token"], self.architecture["fc_norm"]
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if has_class_token else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if distilled else None
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, embed_dim)) if reg_tokens else None
        self.num_prefix_tokens: int = has_class_token + distilled + reg_tokens
        self.num_embedded_prefix_tokens = 0 if self.architecture["no_embed_class"] else self.num_prefix_tokens
        if pos_embed == "learned":
            length = self.num_embedded_prefix_tokens + self.grid_size[0] * self.grid_size[1]
            self.pos_embed = nn.Parameter(torch.empty(1, length, embed_dim))
        else:
            fixed = build_sincos_positions(self.grid_size, embed_dim) if pos_embed == "sincos" else None
            self.register_buffer("pos_embed", fixed, persistent=False)
        taken = ("mlp_ratio", "mlp", "qkv_bias", "qk_norm", "init_values", "attention_backend")
        options = {name: arguments[name] for name in taken}
        drop_paths = [drop_path_rate * layer / max(depth - 1, 1) for layer in range(depth)]
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, drop_path=rate, **options) for rate in drop_paths)
        self.norm = nn.Identity() if fc_norm else nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.seq_pool = nn.Linear(embed_dim, 1) if global_pool == "attention" else None
        self.fc_norm = nn.LayerNorm(embed_dim, eps=NORM_EPS) if fc_norm else nn.Identity()
        self.head = self._build_head()
        self.head_dist = self._build_head() if distilled else None
        initialise(self)

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches: the shape of an attention map."""
        return self.patch_embed.grid_size

    @property
    def num_read_tokens(self) -> int | None:
        """Leading tokens that the head reads; None: it reads them all. The last block may skip the others."""
        return None if self.global_pool != "token" else 1 + (self.head_dist is not None)

    def forward(self, images: Images) -> Logits:
        # same logits, same gradients, one block's work less; hooks of an evaluated model may want every token
        read = self.num_read_tokens if self.training else None
        return self.forward_head(self.forward_features(images, read=read))

    def forward_with_attention(self, images: Images) -> tuple[Logits, list[Float[Tensor, "B H N N"]]]:
        """Logits and every layer's attention, first layer first."""
        tokens, attentions = self.forward_features_with_attention(images)
        return self.forward_head(tokens), attentions

    def forward_features_with_attention(
        self, images: Images
    ) -> tuple[Float[Tensor, "B N D"], list[Float[Tensor, "B H N N"]]]:
        """Tokens after the final norm and every layer's attention, first layer first."""
        tokens, attentions = self._embed(images), []
        for block in self.blocks:
            tokens, weights = cast(Block, block).forward_with_weights(tokens)
            attentions.append(weights)
        return cast(Tensor, self.norm(tokens)), attentions

    def forward_features(self, images: Images, *, read: int | None = None) -> Float[Tensor, "B M D"]:
        """Tokens (the first `read` of them) after the final norm: prefix tokens, then patches row by row."""
        tokens = self._embed(images)
        if self.training and self.patch_drop_rate:
            tokens = drop_patches(tokens, self.patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
        for layer, block in enumerate(self.blocks):
            leading = read if layer == len(self.blocks) - 1 else None
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, read=leading, use_reentrant=False)
            else:
                tokens = block(tokens, read=leading)
        return cast(Tensor, self.norm(tokens))

    def forward_head(self, tokens: Tokens) -> Logits:
        """Pool the tokens and classify."""
        if self.head_dist is not None:
            return cast(Tensor, (self.head(tokens[:, 0]) + self.head_dist(tokens[:, 1])) / 2)
        patches = tokens[:, self.num_prefix_tokens :]
        if self.global_pool == "attention":
            pooled = (self.compute_pool_weights(tokens)[:, None] @ patches)[:, 0]
        elif self.global_pool == "token":
            pooled = tokens[:, 0]
        else:
            pooled = patches.mean(dim=1) if self.global_pool == "avg" else patches.amax(dim=1)
        return cast(Tensor, self.head(self.fc_norm(pooled)))

    def compute_pool_weights(self, tokens: Tokens) -> Float[Tensor, "B P"]:
        """Attention pooling's weight of each patch, summing to one per image; only for global_pool="attention"."""
        if self.seq_pool is None:
            raise ValueError(f"global_pool={self.global_pool!r} has no pooling weights; only 'attention' has")
        return cast(Tensor, self.seq_pool(tokens[:, self.num_prefix_tokens :])[..., 0].softmax(dim=-1))

    def set_input_size(self, img_size: Size) -> None:
        """Take images of another size from now on. Learned positions are resampled into a new Parameter: build the
        optimizer afterwards."""
        old_grid = self.grid_size
        self.patch_embed.set_input_size(img_size)
        self.architecture["img_size"] = self.patch_embed.img_size
        if isinstance(self.pos_embed, nn.Parameter) and self.grid_size != old_grid:
            positions = self._resample(self.pos_embed.detach(), old_grid, self.grid_size)
            self.pos_embed = nn.Parameter(positions, requires_grad=self.pos_embed.requires_grad)
        elif self.pos_embed is not None and self.grid_size != old_grid:
            self.pos_embed = build_sincos_positions(self.grid_size, self.embed_dim).to(self.pos_embed)

    def reset_classifier(self, num_classes: int) -> None:
        """A new, untrained head (both, when distilled) for another number of classes."""
        self.num_classes = self.architecture["num_classes"] = num_classes
        self.head = self._build_head()
        self.head_dist = self._build_head() if self.head_dist is not None else None

    def freeze(self, part: Literal["backbone"] | int) -> None:
        """Stop training "backbone" (all but the head: a linear probe), or the embeddings and the first n blocks."""
        if part != "backbone" and not 0 <= part <= len(self.blocks):
            raise ValueError(f"freeze {part}: the model has {len(self.blocks)} blocks; or freeze 'backbone'")
        trained = ["head.", "head_dist."]
        if part != "backbone":
            trained += ["norm.", "seq_pool.", "fc_norm."]
            trained += [f"blocks.{layer}." for layer in range(part, len(self.blocks))]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(trained)))

    def _build_head(self) -> nn.Module:
        head = nn.Linear(self.embed_dim, self.num_classes) if self.num_classes else nn.Identity()
        initialise(head)
        return head.to(next(self.parameters()))

    def _embed(self, images: Images) -> Tokens:
        tokens: Tensor = self.patch_embed(images)
        positions, img_size = self.pos_embed, (images.shape[2], images.shape[3])
        if positions is not None and img_size != self.patch_embed.img_size:  # as `dynamic_img_size` allows
            rows, columns = self.patch_embed.patch_size
            positions = self._resample(positions, self.grid_size, (img_size[0] // rows, img_size[1] // columns))
        if positions is not None and not self.num_embedded_prefix_tokens:
            tokens = tokens + positions
        prefix = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        if prefix:
            tokens = torch.cat([*(token.expand(tokens.shape[0], -1, -1) for token in prefix), tokens], dim=1)
        if positions is not None and self.num_embedded_prefix_tokens:
            tokens = tokens + positions
        return tokens

    def _resample(self, positions: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
        prefix = self.num_embedded_prefix_tokens
        return resample_positions(positions, old_grid=old_grid, new_grid=new_grid, num_prefix_tokens=prefix)


def _resolve(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every None that has a default replaced. Raises ValueError for those that contradict."""
    pool, distilled = arguments["global_pool"], arguments["distilled"]
    class_token, fc_norm = arguments["class_token"], arguments["fc_norm"]
    check_choice(pool, ("attention", "avg", "max", "token"), name="global_pool")
    check_choice(arguments["pos_embed"], ("learned", "none", "sincos"), name="pos_embed")
    class_token = pool == "token" if class_token is None else class_token
    if (pool == "token" or distilled) and not class_token:
        raise ValueError("global_pool='token' reads the class token; drop class_token or use global_pool='avg'")
    if distilled and pool != "token":
        raise ValueError(f"a distilled model reads its two tokens: global_pool must be 'token', not {pool!r}")
    if not 0 <= arguments["reg_tokens"] <= 8:
        raise ValueError(f"reg_tokens {arguments['reg_tokens']} is not from 0 to 8")
    if arguments["depth"] < 1 or arguments["num_classes"] < 0:
        raise ValueError("depth {depth} and num_classes {num_classes} must be at least 1 and 0".format(**arguments))
    sizes = {name: as_pair(arguments[name], name=name) for name in ("img_size", "patch_size")}
    fc_norm = pool in ("avg", "max") if fc_norm is None else fc_norm
    no_embed_class = arguments["no_embed_class"] or arguments["pos_embed"] == "sincos"
    return arguments | sizes | {"class_token": class_token, "fc_norm": fc_norm, "no_embed_class": no_embed_class}


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """As DeiT and timm: linear maps and learned positions truncated normal with σ = 0.02, biases zero, tokens near 0.
    Convolutions are normal with the variance that keeps the signal's: LeCun et al. 1998; before ReLU He et al. 2015."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # there are no values, and to draw them torch imports its compiler, 3 s
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=0.02)
        elif isinstance(part, nn.Conv2d):
            gain = 1.0 if name.endswith("patch_embed.proj") else 2.0
            nn.init.normal_(part.weight, std=(gain / part.weight[0].numel()) ** 0.5)
        if isinstance(part, nn.Linear | nn.Conv2d) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for name, parameter in module.named_parameters(recurse=False):
        if name == "pos_embed":
            nn.init.trunc_normal_(parameter, std=0.02)
        elif name.endswith("_token"):
            nn.init.normal_(parameter, std=1e-6)
