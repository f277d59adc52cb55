"""What a model consists of: its blocks and what they store, read from a model on the meta device.

:func:`describe` cuts a model into :class:`Block` pieces that a device map can place one by one; it needs no weights
and no accelerator. :mod:`gemma4_compat._memory.formulas` says how much memory computing them takes, and
:mod:`gemma4_compat._memory.layout` places them. Bytes are counted as PyTorch's allocator counts them
(``torch.cuda.memory_allocated``: each tensor rounded up to 512 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.quantization import bytes as quantized_bytes
from gemma4_compat._gemma4.quantization import config, experts
from gemma4_compat._memory import upstream

#: The kinds of blocks, in the order in which layouts evict them: "per_layer_embedding", "tower" (vision, audio and
#: their multimodal embedders), "layer" (decoder layers); and what stays: "embedding", "head", "rest".
Kind = Literal["per_layer_embedding", "tower", "layer", "embedding", "head", "rest"]

_ALIGNMENT = 512


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One decoder layer's attention; ``window`` is None for full attention, ``shared`` layers hold no KV cache."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_width: int
    window: int | None
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Size:
    """One way to store a block.

    Attributes:
        nbytes: sum over its tensors, including quantization states; a tied weight counts in the first block that has
            it.
        allocated: the same with every tensor rounded up to 512 bytes, as on an accelerator or in a module group.
        leaf: the largest module without children, which is what accelerate's hooks onload at a time.
    """

    nbytes: int
    allocated: int
    leaf: int

    def less(self, part: Size) -> Size:
        """The size without one of its parts."""
        return replace(self, nbytes=self.nbytes - part.nbytes, allocated=self.allocated - part.allocated)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of the model that a device map places as a whole.

    Attributes:
        name: its path in the model, a key for ``device_map``.
        kind: see :data:`Kind`.
        stored: its size once quantized; :attr:`plain` if nothing in it is quantized.
        plain: its size before it is quantized.
        quantized_away: whether it stays quantized off the accelerator. For a dict map, transformers' default is that
            it does not.
        workspace: bytes of the largest dequantized weight: bitsandbytes makes one for more than one token.
        loading: bytes of the largest single weight before it is quantized.
        adapter: bytes of the adapter on it; they stay on the accelerator that computes the block.
        modality: "vision" or "audio" for a tower.
        attention: of a decoder layer.
        intermediate: width of a decoder layer's MLP.
        experts: bytes of a decoder layer's quantized experts once they are dequantized; 0 if none are quantized.
        experts_stored: the part of ``stored`` that is a layer's experts, which a map may place separately; or None.
        experts_plain: the same part of ``plain``.
        tied: name of the block that holds its weight, for a head tied to the embedding.
    """

    name: str
    kind: Kind
    stored: Size
    plain: Size
    workspace: int
    loading: int
    adapter: int = 0
    modality: str | None = None
    attention: Attention | None = None
    intermediate: int = 0
    experts: int = 0
    experts_stored: Size | None = None
    experts_plain: Size | None = None
    tied: str | None = None
    quantized_away: bool = True

    @property
    def away(self) -> Size:
        """Its size off the accelerator."""
        return self.stored if self.quantized_away else self.plain

    @property
    def experts_away(self) -> Size:
        """The same for its experts; nothing for a block without experts."""
        size = self.experts_stored if self.quantized_away else self.experts_plain
        return Size(nbytes=0, allocated=0, leaf=0) if size is None else size

    @property
    def experts_name(self) -> str:
        """The key of a decoder layer's experts in a device map, inside the layer's own key."""
        return f"{self.name}.experts"

    def without_experts(self) -> Block:
        """The block when its experts are elsewhere; they are computed with it."""
        if self.experts_stored is None or self.experts_plain is None:
            return self
        return replace(
            self,
            stored=self.stored.less(self.experts_stored),
            plain=self.plain.less(self.experts_plain),
            experts=self.experts if self.quantized_away else 0,
            experts_stored=None,
            experts_plain=None,
            loading=0,
        )

    def brought_in(self) -> Block:
        """The block as it is computed after it was away: what is not quantized there needs no dequantized copy."""
        return self if self.quantized_away else replace(self, workspace=0, experts=0)


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model as blocks, and the shapes that activations depend on.

    Attributes:
        blocks: cover every parameter and buffer once, in the model's order.
        model_class: name of its class in ``transformers``.
        quantization: see ``config.QUANTIZATIONS``; None if nothing is quantized.
        item: bytes of an activation's element (2 for bf16).
        hidden: width of the residual stream.
        vocabulary: rows of the head.
        per_layer_width: width of the per-layer inputs of all layers together; 0 without them.
        experts: (number, number used per token, width) of a mixture of experts, or None.
        patches: number of patches per soft token of an image in the vision tower; 0 without a tower.
        vision: (width, width of the MLP, heads, rows of the position embedding) of the vision tower, or None.
        audio: (width, channels of the first convolution) of the audio tower, or None.
        math_attention, one_hot_positions, one_query, one_query_packed, static_masks: what this transformers does; see
            :mod:`upstream`, whose functions have these names.
    """

    blocks: tuple[Block, ...]
    model_class: str
    quantization: str | None
    item: int
    hidden: int
    vocabulary: int
    per_layer_width: int = 0
    experts: tuple[int, int, int] | None = None
    patches: int = 0
    vision: tuple[int, int, int, int] | None = None
    audio: tuple[int, int] | None = None
    math_attention: bool = False
    one_hot_positions: bool = False
    one_query: bool = False
    one_query_packed: bool = False
    static_masks: bool = False

    @property
    def layers(self) -> tuple[Block, ...]:
        """The decoder layers, in order."""
        return tuple(block for block in self.blocks if block.kind == "layer")

    def offloading(self, *, quantized: bool) -> Blueprint:
        """The model with its blocks staying quantized off the accelerator, or not."""
        return replace(self, blocks=tuple(replace(block, quantized_away=quantized) for block in self.blocks))


def rounded(nbytes: int) -> int:
    """``nbytes`` as an allocator or a module group rounds them up."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def describe(
    model: Any,
    quantization: str | None = None,
    quantized: Callable[[str], bool] | Collection[str] | None = None,
    *,
    adapter: Mapping[str, int] | None = None,
    experts: bool = False,
) -> Blueprint:
    """Cut a model into blocks.

    Args:
        model: a Gemma 4 of any of its classes, on meta or loaded; bitsandbytes modules are recognized.
        quantization: how modules that are to be quantized will be stored; None: as the model has them now.
        quantized: the ``nn.Linear`` modules that will be quantized, by path: a predicate, or the paths. Modules that
            already are bitsandbytes' always count as quantized. None: no others.
        adapter: bytes of an adapter by path of the module they sit on (:func:`adapter_sizes`).
        experts: whether experts will also be quantized (``quantize(experts=True)``); quantized ones always
            count.

    Raises:
        Gemma4CompatError: the model is not a Gemma 4 language model, or the quantization is unknown.
    """
    if quantization is not None:
        config.check(quantization, or_none=True)
    path, text = _text_model(model)
    chosen = quantized if callable(quantized) else frozenset(quantized or ()).__contains__
    sizes = _Sizes(model, quantization, chosen, experts)
    remaining = dict(adapter or {})
    blocks = []
    for name, kind, module in _pieces(model, path):
        own = {key: remaining.pop(key) for key in list(remaining) if key == name or key.startswith(f"{name}.")}
        blocks.append(_block(name, kind, module, sizes, sum(own.values())))
    if remaining:
        raise Gemma4CompatError(
            f"the adapter has weights for {next(iter(remaining))!r}, which {type(model).__name__} does not have; "
            "it was made for another model, or for another of its classes"
        )
    return Blueprint(
        blocks=tuple(blocks),
        model_class=type(model).__name__,
        quantization=quantization or sizes.found,
        **_shapes(model, text),
    )


class _Sizes:
    """Sizes of modules; a tied weight counts the first time it is seen."""

    def __init__(self, model: Any, quantization: str | None, chosen: Callable[[str], bool], experts: bool) -> None:
        self.quantization = quantization
        self.experts = experts
        self.found: str | None = None
        self._chosen = chosen
        self._owners: dict[int, str] = {}
        # A model whose weights are not tied yet declares which will be.
        ties = getattr(model, "all_tied_weights_keys", None) or {}
        self._ties = ties if isinstance(ties, dict) else {}

    def tensors(self, name: str, module: Any) -> Iterator[tuple[str, list[int], list[int], int, int, int]]:
        """For each module below ``name``: its path, bytes of its tensors stored and plain, workspace, loading, and
        bytes of its quantized experts.
        """
        for part, leaf in module.named_modules():
            path = ".".join(filter(None, (name, part)))
            way = self._way(path, leaf)
            stored: list[int] = []
            plain: list[int] = []
            workspace = loading = experts = 0
            for key, tensor in (*leaf.named_parameters(recurse=False), *leaf.named_buffers(recurse=False)):
                full = f"{path}.{key}"
                if self._ties.get(full, full) != full or self._owners.setdefault(id(tensor), full) != full:
                    continue
                if (shape := self._expert_shape(leaf, tensor)) is not None:
                    stored += quantized_bytes.expert_tensors(*shape, self.found or "4bit")
                    plain.append(2 * math.prod(shape))
                    experts += plain[-1]
                    loading = max(loading, plain[-1])
                elif way is not None and key == "weight":
                    rows, columns = leaf.out_features, leaf.in_features
                    stored += quantized_bytes.linear_tensors(rows, columns, way)
                    plain.append(2 * rows * columns)
                    workspace = 0 if way == "8bit" else 2 * rows * columns
                    loading = 2 * rows * columns
                elif not (way == "8bit" and key == "SCB"):
                    stored.append(tensor.numel() * tensor.element_size())
                    plain.append(stored[-1])
            yield path, stored, plain, workspace, loading, experts

    def owner(self, tensor: Any, path: str) -> str:
        """The path at which a weight was counted."""
        return self._ties.get(path) or self._owners.get(id(tensor), path)

    def _expert_shape(self, module: Any, tensor: Any) -> tuple[int, int, int] | None:
        """(experts, rows, columns) of a parameter of experts that is, or will be, quantized; else None."""
        if not experts.is_experts(module):
            return None
        state = vars(tensor).get("quant_state")
        if state is not None:
            self.found = "4bit-double" if state.nested else "4bit"
        elif "quant_state" in vars(tensor) and tensor.ndim == 3:  # in a load that will quantize it
            self.found = "4bit-double" if tensor.compress_statistics else "4bit"
        elif not self.experts or tensor.ndim != 3 or tensor[0].numel() % quantized_bytes.BLOCK:
            return None
        else:
            self.found = self.quantization
        count, rows, columns = tensor.shape if state is None else state.shape
        return count, rows, columns

    def _way(self, path: str, module: Any) -> str | None:
        names = {base.__name__ for base in type(module).__mro__}
        if "Linear8bitLt" in names:
            way = "8bit"
        elif "Linear4bit" in names:
            double = getattr(module.weight, "compress_statistics", False)
            state = getattr(module.weight, "quant_state", None)
            nested = getattr(state, "nested", None)
            way = "4bit-double" if (double if nested is None else nested) else "4bit"
        elif self.quantization is not None and "Linear" in names and self._chosen(path):
            way = self.quantization
        else:
            return None
        self.found = way
        return way


def _block(name: str, kind: Kind, module: Any, sizes: _Sizes, adapter: int) -> Block:
    if not hasattr(module, "named_modules"):  # a parameter or buffer of a module that is not placed as a whole
        size = module.numel() * module.element_size()
        one = Size(nbytes=size, allocated=rounded(size), leaf=rounded(size))
        return Block(name=name, kind=kind, stored=one, plain=one, workspace=0, loading=0, adapter=adapter)
    parts = list(sizes.tensors(name, module))
    layer = kind == "layer"
    apart = [part for part in parts if part[0] == f"{name}.experts"] if layer else []
    tied = None
    if kind == "head" and hasattr(module, "weight"):
        owner = sizes.owner(module.weight, f"{name}.weight").rpartition(".")[0]
        tied = owner if owner != name else None
    return Block(
        name=name,
        kind=kind,
        stored=_size([part[1] for part in parts]),
        plain=_size([part[2] for part in parts]),
        workspace=max(part[3] for part in parts),
        loading=max(part[4] for part in parts),
        experts=sum(part[5] for part in parts),
        experts_stored=_size([part[1] for part in apart]) if apart else None,
        experts_plain=_size([part[2] for part in apart]) if apart else None,
        adapter=adapter,
        modality=("vision" if "vision" in name else "audio") if kind == "tower" else None,
        attention=_attention(module.self_attn) if layer else None,
        intermediate=module.mlp.gate_proj.out_features if layer else 0,
        tied=tied,
    )


def _size(leaves: list[list[int]]) -> Size:
    aligned = [sum(map(rounded, tensors)) for tensors in leaves]
    return Size(nbytes=sum(map(sum, leaves)), allocated=sum(aligned), leaf=max(aligned))


def _attention(module: Any) -> Attention:
    shared = bool(module.is_kv_shared_layer)
    width = int(module.q_proj.out_features)
    return Attention(
        heads=width // int(module.head_dim),
        kv_heads=width // int(module.head_dim) // int(module.num_key_value_groups),
        head_dim=int(module.head_dim),
        kv_width=0 if shared else int(module.k_proj.out_features),
        window=int(module.sliding_window) if module.is_sliding else None,
        shared=shared,
    )


def _text_model(model: Any) -> tuple[str, Any]:
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if {"embed_tokens", "layers"} <= children.keys() and "Gemma4" in type(module).__name__:
            return name, module
    raise Gemma4CompatError(f"{type(model).__name__} has no Gemma 4 language model (embed_tokens and layers) in it")


def _pieces(model: Any, path: str) -> Iterator[tuple[str, Kind, Any]]:
    """Paths, kinds and modules of the blocks: the parts of the text model, and everything beside the path to it."""
    inside: dict[str, Kind] = {"embed_tokens": "embedding", "embed_tokens_per_layer": "per_layer_embedding"}
    first, _, rest = path.partition(".")
    children = dict(model.named_children())
    for name, child in children.items():
        if not path and name == "layers":
            for index, layer in enumerate(child):
                yield f"{name}.{index}", "layer", layer
        elif not path:
            yield name, inside.get(name, "rest"), child
        elif name != first:
            yield name, _kind_beside(name, children), child
        else:
            yield from ((f"{name}.{part}", kind, module) for part, kind, module in _pieces(child, rest))
    for name, tensor in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)):
        yield name, "rest", tensor


def _kind_beside(name: str, siblings: Collection[str]) -> Kind:
    if name == "lm_head":
        return "head"
    if name in ("vision_tower", "audio_tower"):
        return "tower"
    # The encoder-free models have only these; in the others they are small multimodal embedders behind a tower.
    if name in ("embed_vision", "embed_audio") and f"{name.removeprefix('embed_')}_tower" not in siblings:
        return "tower"
    return "rest"


def _shapes(model: Any, text: Any) -> dict[str, Any]:
    text_config = text.config
    vision, audio = (getattr(model.config, f"{name}_config", None) for name in ("vision", "audio"))
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    per_layer = getattr(text, "embed_tokens_per_layer", None)
    shapes: dict[str, Any] = {
        "item": text.embed_tokens.weight.element_size(),
        "hidden": text.embed_tokens.embedding_dim,
        "vocabulary": text.embed_tokens.num_embeddings,
        "per_layer_width": 0 if per_layer is None else per_layer.embedding_dim,
        "math_attention": upstream.math_attention(),
        "one_hot_positions": upstream.one_hot_positions(),
        "one_query": upstream.one_query(text),
        "one_query_packed": upstream.one_query_packed(),
        "static_masks": upstream.static_masks(),
    }
    if getattr(text_config, "enable_moe_block", False):
        shapes["experts"] = (text_config.num_experts, text_config.top_k_experts, text_config.moe_intermediate_size)
    if "vision_tower" in names and vision is not None:
        heads = vision.num_attention_heads
        shapes["vision"] = (vision.hidden_size, vision.intermediate_size, heads, vision.position_embedding_size)
        shapes["patches"] = vision.pooling_kernel_size**2
    if "audio_tower" in names and audio is not None:
        shapes["audio"] = (audio.hidden_size, audio.subsampling_conv_channels[0])
    return shapes


def adapter_sizes(folder: Any) -> dict[str, int]:
    """Bytes of a saved adapter by path of the module they sit on, read from ``adapter_model.safetensors``' header.

    PEFT loads a bf16 or fp16 adapter into fp32 (``autocast_adapter_dtype``), so every value counts four bytes.

    Raises:
        Gemma4CompatError: the folder has no adapter, or one that is damaged or not in safetensors.
    """
    from gemma4_compat._gemma4.adapters import saved  # with json, which importing the package does not load

    sizes: dict[str, int] = {}
    for key, tensor in saved.read(folder).tensors.items():
        path = saved.module_of(key)
        sizes[path] = sizes.get(path, 0) + rounded(4 * math.prod(tensor.shape))
    return sizes
