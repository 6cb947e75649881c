"""Find the attention layers of a vision transformer, and read those of each family, unmodified.

Supporting another family is one subclass of `AttentionLayer` in `LAYER_KINDS`.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from vit.explanation.capture.watch import AttentionCall, AttentionWatch, softmax_in_place
from vit.model.logits import at_least_float32
from vit.runtime.device import count_total_bytes

# rows are queries, columns keys
Attention = Float[Tensor, "B H Nq N"]

SUPPORTED = (
    "this project's models, timm's VisionTransformer, Eva and Beit, torchvision's "
    "VisionTransformer and Hugging Face's ViT, DeiT, DINOv2, DINOv3, BEiT, CLIP and SigLIP"
)
# number of attention weights in memory at once on a CPU: 8 MiB fit the cache and are enough work
# for one call
CHUNK_ELEMENTS = 2**21
# on a GPU, fraction of its memory for one such matrix, of which several exist at once: 0.6 GB of
# 80 GB
_CHUNK_FRACTION = 1 / 128
# Queries and keys are kept if the input of their layer is at most this large. Else they are
# projected again.
_MAX_TOKEN_BYTES = 10 * 2**20
_VERIFIED_QUERIES = 64  # number of queries that are verified; all would need the N×N matrix


class AttentionLayer:
    """One attention layer, and the tensors of it that the last forward pass left.

    This class reads modules with timm's names (and `norm` before `proj`); a subclass reads the other
    families.
    """

    def __init__(self, place: "LayerPlace") -> None:
        self.place = place
        self.name = place.name
        self.block = place.block
        self.module: Any = place.module
        self.num_heads = place.num_heads
        self.captured = False
        self.num_calls = 0  # in this forward pass
        self.returns_tuple = False
        self.batch = 0
        self.num_tokens = 0
        self.num_queries = 0
        # [B, H, N, K], as the module's own code made them; None where they are projected from the
        # tokens again
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        # [B, N, D], input of the attention module
        self.tokens: Tensor | None = None
        # largest attention that a patch draws, in multiples of the average token's; None until a
        # rollout has set it
        self.max_drawn: float | None = None
        # the heads' results side by side, O [B, N, H·K], in the autograd graph; only with gradients
        self.heads: Tensor | None = None
        # input and output of the block, [B, N, D]; with gradients, or where they are asked for
        self.block_input: Tensor | None = None
        self.block_tokens: Tensor | None = None
        # queries and keys in the autograd graph, and values of a pass that can't be repeated; only
        # with gradients
        self._in_graph: dict[str, Tensor] = {}
        self._value: Tensor | None = None
        self._gradients = False
        self._verified = False
        self._verified_heads: Tensor | None = None  # until the module's own output is seen

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        """Return whether this class reads `module`, a child of `block`."""
        # Parallel branches (timm's ParallelThingsBlock) are no successive layers: a rollout can't
        # multiply them.
        is_branch = isinstance(block, nn.Sequential)
        names = ("q_norm", "k_norm", "num_heads", "scale", "qkv", "proj")
        return not is_branch and all(hasattr(module, name) for name in names)

    def query_and_key(
        self, images: slice
    ) -> tuple[Float[Tensor, "b H Nq K"], Float[Tensor, "b H N K"]]:
        """Return the queries and keys whose softmax(query keyᵀ) is the attention, in float32 or
        more."""
        if self.query is not None and self.key is not None:
            query = self.query[images]
            key = self.key[images]
        else:
            assert self.tokens is not None
            with torch.no_grad():
                tokens = self.tokens[images].detach()
                # a call would run the hooks once more
                query = self.module.q_norm.forward(self._split(self._project(tokens, 0)))
                key = self.module.k_norm.forward(self._split(self._project(tokens, 1)))
        return at_least_float32(query) * self.module.scale, at_least_float32(key)

    @property
    def chunk_elements(self) -> int:
        """Number of attention weights in memory at once."""
        device = next(self.block.parameters()).device
        if device.type == "cpu":
            return CHUNK_ELEMENTS
        num_elements = int(_CHUNK_FRACTION * count_total_bytes(device)) // 4  # in float32
        return max(num_elements, CHUNK_ELEMENTS)

    def compute_weights(self, images: slice) -> Callable[[slice], Attention]:
        """Return a function from a few queries to their attention."""
        query, key = self.query_and_key(images)
        keys = key.transpose(-2, -1)

        def attend(rows: slice) -> Attention:
            return softmax_in_place(query[:, :, rows] @ keys)

        return attend

    @torch.no_grad()
    def attention(self, images: slice = slice(None), queries: slice = slice(None)) -> Attention:
        """Compute the weights after the softmax; rows are queries and sum to one."""
        return self.compute_weights(images)(queries)

    def attention_in_graph(self) -> Attention:
        """Compute `attention` in the autograd graph of a pass with gradients."""
        query = at_least_float32(self._in_graph["query"]) * self.module.scale
        keys = at_least_float32(self._in_graph["key"]).transpose(-2, -1)
        return softmax_in_place(query @ keys)

    def attend(
        self, pool_weights: Float[Tensor, "B N"], images: slice = slice(None)
    ) -> Float[Tensor, "b H N"]:
        """Compute what the pooled feature attends to in each head, uᵀA."""
        weights = at_least_float32(pool_weights[images])[:, None, None]  # [b, 1, 1, N]
        return (weights @ self.attention(images))[:, :, 0]

    @torch.no_grad()
    def attention_rows(self, images: slice) -> Iterator[tuple[slice, Attention]]:
        """Compute `attention` for a few queries at a time, and yield it with their places.

        For 4,096 tokens and 12 heads the whole matrix takes 0.8 GB for each image.
        """
        attend = self.compute_weights(images)
        step = max(self.chunk_elements // (self.num_heads * self.num_tokens), 1)
        for start in range(0, self.num_queries, step):
            rows = slice(start, start + step)
            yield rows, attend(rows)

    def in_chunks(self, compute: Callable[[slice], Tensor]) -> Tensor:
        """Call `compute` on a few images of the batch at a time, so that their attention matrices
        of this layer together have about `chunk_elements` numbers."""
        size = max(self.chunk_elements // (self.num_heads * self.num_tokens**2), 1)
        starts = range(0, self.batch, size)
        return torch.cat([compute(slice(start, start + size)) for start in starts])

    def gradient_and_value(
        self, heads_gradient: Float[Tensor, "B Nq E"], images: slice
    ) -> tuple[Tensor, Tensor]:
        """∂f/∂O [b, H, Nq, K] and V [b, H, N, K]; at least float32."""
        # projecting values again is cheap; keeping them would double the memory
        assert self.tokens is not None
        if self._value is None:
            value = self._project(self.tokens[images].detach(), 2).detach()
        else:
            value = self._value[images]
        gradient = at_least_float32(self._split(heads_gradient[images]))
        return gradient, at_least_float32(self._split(value))

    def head_outputs(self) -> Float[Tensor, "B H Nq K"]:
        """Return O of each head, in float32 or more; needs a forward pass with gradients."""
        assert self.heads is not None
        return at_least_float32(self._split(self.heads.detach()))

    def attention_gradient(self, heads_gradient: Tensor, images: slice = slice(None)) -> Attention:
        """∂f/∂A = (∂f/∂O) Vᵀ, per head."""
        gradient, value = self.gradient_and_value(heads_gradient, images)
        return gradient @ value.transpose(-2, -1)

    @torch.no_grad()
    def value_norms(self, images: slice = slice(None)) -> Float[Tensor, "b H N"]:
        """Compute how much a unit of attention moves from each token in each head, ‖v W_O‖
        (Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020)."""
        assert self.tokens is not None
        value = at_least_float32(self._split(self._project(self.tokens[images].detach(), 2)))
        # `forward` is called directly, because a call would run the hooks once more
        projection = self.module.proj
        size = self.num_heads * value.shape[-1]
        # projecting the identity includes what adapters (LoRA) add to the weight
        identity = torch.eye(size, dtype=self.tokens.dtype, device=value.device)
        weight = projection.forward(identity) - projection.forward(torch.zeros_like(identity[:1]))
        return _measure_norms(value, weight)

    def attach(self, *, gradients: bool, block_tokens: bool, verify: bool) -> list[RemovableHandle]:
        """Hook the module. Hooks only read; with `gradients`, what they keep stays in the graph."""
        self._gradients = gradients
        self._verified = not verify

        def on_input(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            # The inputs (query, key, value) are captured by their last one, the values.
            inputs = args
            tokens = inputs[2] if len(inputs) == 3 else inputs[0]
            if tokens.ndim != 3:
                raise ValueError(f"{self.name} attends within windows, not between all patches")
            self.captured = False
            self.num_calls += 1
            self.tokens = tokens
            self.query = self.key = self.max_drawn = self._value = None
            self.batch, self.num_tokens = tokens.shape[:2]
            self.num_queries = inputs[0].shape[1]

        def on_projection(
            attribute: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
        ) -> None:
            if self.tokens is None:
                return
            if gradients:
                self._in_graph[attribute] = output
            # an adapter's dropout would give others
            if self.tokens.nbytes <= _MAX_TOKEN_BYTES or module.training:
                # a view is copied, because it would keep the whole qkv output alive
                setattr(self, attribute, output.detach().contiguous())

        def on_adapter(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            # in training mode, its dropout is another one when it runs again
            if module.training:
                self._value = output.detach().chunk(3, dim=-1)[2]

        def on_heads(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            # in training mode, attention dropout makes O differ from attention · value
            if not self._verified and not self.module.training:
                self._verify(args[0])
            # O is the last tensor of a layer that is captured
            self.captured = True
            self.heads = args[0] if gradients else None

        def on_output(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self.returns_tuple = isinstance(result, tuple)
            self._verify_output(first_output(result))

        handles = [
            self.module.register_forward_pre_hook(on_input, with_kwargs=True),
            self.module.register_forward_hook(on_output),
            # the submodule that takes O
            _first_of(self.module, "norm", "proj").register_forward_pre_hook(on_heads),
        ]
        for attribute, norm in (("query", self.module.q_norm), ("key", self.module.k_norm)):
            handles.append(norm.register_forward_hook(partial(on_projection, attribute)))
        if gradients and type(self.module.qkv) is not nn.Linear:
            handles.append(self.module.qkv.register_forward_hook(on_adapter))
        if block_tokens:
            handles.append(self.block.register_forward_hook(self._keep_block))
        return handles

    @contextmanager
    def without_mixing(self, own_weight: float = 1.0) -> Iterator[None]:
        """Let each token attend to itself alone with this weight, or return the module's input
        multiplied by it."""

        def give_back(*inputs: Any, **options: Any) -> Any:
            result = own_weight * inputs[0]
            return (result, None) if self.returns_tuple else result

        with replace_blocks([self.module], give_back):
            yield

    def _keep_block(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self.block_input = args[0]
        self.block_tokens = first_output(result)

    def _project(self, tokens: Float[Tensor, "B N D"], which: int) -> Float[Tensor, "B N E"]:
        """Compute queries (0), keys (1) or values (2), heads side by side."""
        qkv = self.module.qkv
        # an adapter around the layer (LoRA) adds to the result of its weight
        if type(qkv) is not nn.Linear:
            return cast("Tensor", qkv(tokens).chunk(3, dim=-1)[which])

        size = qkv.out_features // 3
        rows = slice(which * size, (which + 1) * size)
        bias = None if qkv.bias is None else qkv.bias[rows]
        return F.linear(tokens, qkv.weight[rows], bias)

    @torch.no_grad()
    def _verify(self, heads: Tensor) -> None:
        """Compare the first queries of the first image with A·V."""
        assert self.tokens is not None
        first_image = slice(1)
        actual = at_least_float32(heads[first_image, :_VERIFIED_QUERIES])
        try:
            attention = self.attention(first_image, slice(_VERIFIED_QUERIES))
            value = self._split(self._project(self.tokens[first_image], 2))
            expected = (attention @ at_least_float32(value)).transpose(1, 2).flatten(2)
            error = (expected - actual).abs().max()
        except RuntimeError:  # the shapes differ
            error = torch.tensor(math.inf)
        if error > _tolerance(heads) * actual.abs().max():
            raise ValueError(
                f"{self.name} computes something else than softmax(q kᵀ)·v, perhaps with a mask "
                "or a position bias, so its attention is unknown"
            )
        self._verified = True
        self._verified_heads = heads[first_image, :_VERIFIED_QUERIES]

    @torch.no_grad()
    def _verify_output(self, output: Tensor) -> None:
        """Compare the module's output with the projection of the heads that were verified."""
        if self._verified_heads is None:
            return
        heads, self._verified_heads = self._verified_heads, None
        expected = at_least_float32(self._project_output(heads))
        actual = at_least_float32(output[:1, :_VERIFIED_QUERIES])
        if (expected - actual).abs().max() > _tolerance(heads) * actual.abs().max():
            raise ValueError(
                f"{self.name} gives something else than the projection of its heads (a gate, or "
                "a second branch?), so its attention isn't all that mixes tokens"
            )

    def _project_output(self, heads: Tensor) -> Tensor:
        """Compute the module's output from its heads."""
        # `forward` is called directly, because a call would run the hooks once more
        if hasattr(self.module, "norm"):
            heads = self.module.norm.forward(heads)
        return cast("Tensor", self.module.proj.forward(heads))

    def _split(self, tensor: Tensor) -> Tensor:
        return torch.unflatten(tensor, -1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, N, K]


class WatchedLayer(AttentionLayer):
    """An attention layer whose attention is seen while it is computed, see `watch`."""

    def __init__(self, place: "LayerPlace") -> None:
        super().__init__(place)
        self._call: AttentionCall | None = None
        self._call_in_graph: AttentionCall | None = None

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        if isinstance(module, nn.MultiheadAttention):
            return type(block).__name__ == "EncoderBlock"  # torchvision
        hugging_face = ("q_proj", "k_proj", "v_proj", "config")
        beit = ("num_heads", "scale", "qkv", "proj", "relative_position_bias_table")
        return type(module).__name__ in ("EvaAttention", "AttentionRope") or any(
            all(hasattr(module, name) for name in names) for names in (hugging_face, beit)
        )

    @property
    def call(self) -> AttentionCall:
        assert self._call is not None
        return self._call

    def compute_weights(self, images: slice) -> Callable[[slice], Attention]:
        return self.call.compute_weights(images)

    def attention_in_graph(self) -> Attention:
        assert self._call_in_graph is not None
        return self._call_in_graph.compute_weights(slice(None))(slice(None))

    def gradient_and_value(self, heads_gradient: Tensor, images: slice) -> tuple[Tensor, Tensor]:
        gradient = at_least_float32(self.call.arrange(heads_gradient)[images])
        if self.call.projection is not None:
            # because the projection W is linear, ∂f/∂O is ∂f/∂result · W
            gradient = self._split(gradient @ at_least_float32(self.call.projection[0]))
        return gradient, at_least_float32(self.call.value[images])

    def head_outputs(self) -> Float[Tensor, "B H Nq K"]:
        value = at_least_float32(self.call.value)
        return self.in_chunks(lambda images: self.attention(images) @ value[images])

    @torch.no_grad()
    def value_norms(self, images: slice = slice(None)) -> Float[Tensor, "b H N"]:
        value = at_least_float32(self.call.value[images])
        if self.call.output_weight is None:
            return value.square().sum(dim=-1).sqrt()
        return _measure_norms(value, self.call.output_weight.mT)

    def attach(self, *, gradients: bool, block_tokens: bool, verify: bool) -> list[RemovableHandle]:
        self._gradients = gradients
        self._verified = not verify

        def on_block_input(
            module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            tokens = args[0] if args else options["hidden_states"]
            if tokens.ndim != 3:
                raise ValueError(f"{self.name} attends within windows, not between all patches")
            self.tokens = self.place.order(tokens)
            if block_tokens:
                self.block_input = self.tokens
            self.batch, self.num_tokens = self.tokens.shape[:2]
            if not self.place.tokens_first:
                return None
            # the block reads the tensor that is kept, so that it has a gradient
            return (self.place.order(self.tokens), *args[1:]), options

        def on_block_output(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            self.block_tokens = self.place.order(first_output(result))
            if not self.place.tokens_first:
                return None
            tokens = self.place.order(self.block_tokens)
            return (tokens, *result[1:]) if isinstance(result, tuple) else tokens

        def on_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            self.captured = False
            self.num_calls += 1
            self.max_drawn = None
            inputs = args[0] if args else None
            shape = (self.batch, self.num_tokens)
            if not isinstance(inputs, Tensor) or inputs.ndim != 3:
                return None
            if inputs.shape[:2] == shape and not self.place.tokens_first:
                self.tokens = inputs
            elif inputs.shape[:2] == shape[::-1]:
                # the model's functions alone are counted, see `Stream`
                with torch._C.DisableTorchFunction():
                    self.tokens = inputs.transpose(0, 1)
                    inputs = self.tokens.transpose(0, 1)
                # queries, keys and values may be one tensor
                return tuple(inputs if arg is args[0] else arg for arg in args)
            return None

        handles: list[RemovableHandle] = [
            self.block.register_forward_pre_hook(on_block_input, with_kwargs=True),
            self.module.register_forward_pre_hook(on_input),
            *self.watch(self._keep_call),
        ]
        if block_tokens:
            handles.append(self.block.register_forward_hook(on_block_output))
        return handles

    def watch(
        self, keep: Callable[[AttentionCall], object], *, own_weight: float | None = None
    ) -> list[RemovableHandle]:
        """Hook the module so that `AttentionWatch` sees what it computes."""
        running: list[AttentionWatch] = []

        def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
            running.append(AttentionWatch(self.batch, keep, own_weight=own_weight))
            running[-1].__enter__()  # type: ignore[no-untyped-call]

        def end(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            # also where the module has raised an error
            if running:
                running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        return [
            self.module.register_forward_pre_hook(begin),
            self.module.register_forward_hook(end, always_call=True),
        ]

    @contextmanager
    def without_mixing(self, own_weight: float = 1.0) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in self.watch(lambda call: None, own_weight=own_weight):
                stack.enter_context(handle)
            yield

    def _keep_call(self, call: AttentionCall) -> None:
        self._call_in_graph = self.heads = None
        if self._gradients:
            self._call_in_graph = replace(call)
            self.heads = call.output
        call.detach()
        self._call = call
        self.num_queries = call.num_queries
        if not self._verified and not self.module.training:
            self._verify(call.output)
        self.captured = True
        if not self._gradients:
            call.output = call.output.new_empty(0)

    @torch.no_grad()
    def _verify(self, heads: Tensor) -> None:
        first_image = slice(1)
        actual = at_least_float32(self.call.arrange(heads)[first_image])
        attention = self.attention(first_image, slice(_VERIFIED_QUERIES))
        expected = attention @ at_least_float32(self.call.value[first_image])
        if self.call.projection is not None:
            weight, bias = self.call.projection
            expected = expected.transpose(1, 2).flatten(2) @ at_least_float32(weight).mT
            expected = expected if bias is None else expected + bias
        actual = actual[..., : expected.shape[-2], :]
        error = (expected - actual).abs().max()
        if not error <= _tolerance(heads) * actual.abs().max():
            raise ValueError(
                f"{self.name} computes something else than softmax(q kᵀ)·v, so its attention is "
                "unknown"
            )
        self._verified = True


# The first class that matches reads a layer: AttentionLayer would match EvaAttention too.
LAYER_KINDS = (WatchedLayer, AttentionLayer)


class LayerPlace(NamedTuple):
    """Where an attention layer is in a model, and the class that reads it.

    Attributes:
        kind: The class.
        name: Name of the module.
        module: The module that computes attention.
        block: The module that takes and gives tokens, often with the attention's addition.
        num_heads: Number of heads.
        tokens_first: True if the block takes [tokens, batch, channels].
    """

    kind: type[AttentionLayer]
    name: str
    module: nn.Module
    block: nn.Module
    num_heads: int
    tokens_first: bool = False

    def order(self, tokens: Tensor) -> Tensor:
        """Exchange [tokens, batch, channels] and [batch, tokens, channels], if the block takes the
        former."""
        return tokens.transpose(0, 1) if self.tokens_first else tokens


def find_attention_layers(model: nn.Module) -> list[LayerPlace]:
    """Find the model's self-attention layers by their attributes, in order.

    `ModelReader` searches once and keeps the answer: a search looks at every module of the model.

    Returns:
        The layers; none if there are none of a known kind.

    Raises:
        ValueError: Some of the blocks have attention of a known kind, and others don't.
    """
    family = type(model).__name__
    modules = list(model.named_modules())
    places: list[LayerPlace] = []
    for block_name, block in modules:
        for name, module in block.named_children():
            # attention has projections; asking a module for an attribute that it lacks is slow
            if next(module.children(), None) is None:
                continue
            for kind in LAYER_KINDS:
                if kind.matches(module, block):
                    full_name = f"{block_name}.{name}".removeprefix(".")
                    heads = int(_first_of(module, "num_heads", "num_attention_heads"))
                    places.append(LayerPlace(kind, full_name, module, block, heads))
                    break
    # If one block in a list has known attention, all blocks of its class must have it.
    blocks = {place.block for place in places}
    kinds = {type(block) for block in blocks}
    for name, container in modules:
        if not isinstance(container, nn.ModuleList | nn.Sequential) or blocks.isdisjoint(container):
            continue
        for number, block in enumerate(container):
            if type(block) in kinds and block not in blocks:
                raise ValueError(
                    f"{name}.{number} has no attention of a known kind, as the other blocks of "
                    f"{family} have; known: {SUPPORTED}"
                )
    return places


@contextmanager
def replace_blocks(blocks: Sequence[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Let `forward` compute instead of each of `blocks`, as long as the context lasts."""
    # another library may have set a forward of its own on the instance
    instance_forwards = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = forward
        yield
    finally:
        for block, instance_forward in zip(blocks, instance_forwards, strict=True):
            if instance_forward is None:  # the method of the class is visible again
                del block.forward
            else:
                block.forward = instance_forward


def run_as_written() -> AbstractContextManager[object]:
    """Let compiled parts of a model run as they are written, because their code can't be watched."""
    # nothing is compiled before the compiler is imported, which takes a second
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Let `nn.TransformerEncoderLayer` call its attention, which its fast path computes itself."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def check_calls(layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError if a layer ran more than once in a forward pass."""
    for layer in layers:
        if layer.num_calls > 1:
            raise ValueError(
                f"{layer.name} runs {layer.num_calls} times in one forward pass (test-time "
                "augmentation, or a shared layer?), and a map shows one; pass a model that runs it once"
            )


def _measure_norms(
    value: Float[Tensor, "b H N K"], weight: Float[Tensor, "E D"]
) -> Float[Tensor, "b H N"]:
    """Compute ‖v W_O‖ of each head."""
    weight = torch.unflatten(at_least_float32(weight), 0, (value.shape[1], -1))  # [H, K, D]
    products = weight @ weight.transpose(-2, -1)  # [H, K, K]
    return ((value @ products) * value).sum(dim=-1).clamp_min(0).sqrt()


def _tolerance(tensor: Tensor) -> float:
    """Return the largest relative error; half precision rounds queries and keys before the
    product."""
    return 1e-3 if tensor.dtype in (torch.float32, torch.float64) else 5e-2


def _first_of(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def first_output(result: Any) -> Tensor:
    """Return a module's result, or the first of several."""
    return cast("Tensor", result[0] if isinstance(result, tuple) else result)
