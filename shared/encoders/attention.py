"""Attention, softmax(query·keyᵀ)·value: of rows, of packed documents, and what is faster on a CPU.

Rows attend by torch's fused kernel, or by two matrix products where the kernel is slow. A packed row holds all
documents of a micro-batch, and by default each token would attend to the whole row. Two attention functions are
therefore registered with transformers:

- "packed_varlen": FlashAttention with document boundaries, on CUDA in half precision.
- "packed_padded": everywhere else. Documents are padded to the longest of the micro-batch, but only for attention. The
  plan sorts them by length, so the padding is short. A CPU computes groups of similar length one after the other.

Dropout on a CPU takes, forward and backward, 1 / 2.6 of the time of torch's, which draws a number at a time.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.compat import of_torch_models, of_transformers
from shared.speed.first_token import Documents
from shared.speed.self_check import keep_if_equal, text_batch

ON_GPU, ON_CPU = "sdpa_on_device", "sdpa_or_products"  # our attention to rows
LONGEST = 512  # tokens of a row; with more, the products save too much memory for the backward pass
STEPS = 2**16  # of dropout: a probability is rounded to a multiple of 1 / STEPS
WIDEST_HEAD, AMPERE = 256, (8, 0)  # limits of FlashAttention
PADDED, VARLEN = "packed_padded", "packed_varlen"  # transformers loads a kernel where a name has "flash" in it
SIMILAR = 0.8  # a group of enough work ends before a document that is this much shorter than its longest, or longer
ENOUGH_WORK = 2**21  # documents x squared length x width: about a millisecond, ten times the cost of calling kernels


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """The result of `F.scaled_dot_product_attention` for query, key and value, all [batch, heads, length, width].

    `mask` is True where a token is attended to, and is broadcast to [batch, heads, length, length]. A token that
    attends to nothing gets a finite value.
    """
    if not products_are_faster(query, dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (query * scale) @ key.transpose(-1, -2)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min  # -inf gives NaN in a fully masked row
        scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, lowest)  # faster than to fill scores
    return drop_out(scores.softmax(-1), dropout) @ value


def products_are_faster(query: Tensor, dropout: float) -> bool:
    """Whether matrix products are faster, which they are on a CPU in two cases.

    In bf16 the kernel's backward takes 2 to 10 times as long. With dropout, torch has no kernel and computes the
    products, too, and checks twice for each row of scores whether all of it is masked.
    """
    if query.device.type != "cpu" or query.shape[-2] > LONGEST:
        return False
    autocast = torch.is_autocast_enabled("cpu")
    return dropout > 0 or (torch.get_autocast_dtype("cpu") if autocast else query.dtype) == torch.bfloat16


def use_attention(model: Any, name: str) -> None:
    """Make a model use our attention and mask functions, unless that changes its logits: see `keep_if_equal`.

    Only models that call torch's scaled-dot-product attention through transformers can use them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = getattr(model, "config", None)  # a model without config is allowed
    if of_transformers.attention_name(config) != "sdpa" or not of_transformers.takes_registered_attention(model):
        return
    on_cpu = name == ON_CPU
    AttentionInterface.register(name, products_or_sdpa if on_cpu else of_transformers.attention_function("sdpa"))
    AttentionMaskInterface.register(name, small_mask if on_cpu else always_masked)
    keep_if_equal(
        model,
        f"the attention {name}",
        lambda: model.set_attn_implementation(name),
        lambda: model.set_attn_implementation("sdpa"),
        text_batch,
    )


def products_or_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [batch, heads, length, width] -> [batch, length, heads, width]."""
    same = key.shape == query.shape or query.shape[2] == 1  # one query: see shared/speed/first_token.py
    numbers = attention_mask is not None and attention_mask.is_floating_point()  # added to the scores
    if getattr(module, "is_causal", True) or not same or numbers:  # a decoder: causal or cross attention
        return of_transformers.attention_function("sdpa")(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query, key, value, attention_mask, dropout, scale)
    return out.transpose(1, 2).contiguous(), None


def always_masked(**arguments: Any) -> Tensor | None:
    """transformers' mask interface: the mask of scaled-dot-product attention; None only without an attention mask.

    By itself, transformers drops the mask of a batch without padding. To check this, the host waits for the device.
    transformers allows `allow_is_bidirectional_skip` where only padding and a window limit attention. In rows shorter
    than the window, the mask is then the attention mask, which takes 2 operators instead of 26 to 34.
    """
    if (mask := mask_of_keys(arguments)) is not None:
        return mask.expand(-1, -1, arguments["q_length"], -1)
    if arguments.get("attention_mask") is not None:
        arguments |= {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False}
    return of_transformers.sdpa_mask()(**arguments)


def small_mask(**arguments: Any) -> Tensor | None:
    """transformers' mask interface for a CPU: [batch, 1, 1, keys] where only padding limits attention.

    transformers makes [batch, 1, queries, keys] instead, and torch converts all of it to numbers in each layer: 6 % of
    the time of a small encoder. None: nothing is masked.
    """
    if (mask := mask_of_keys(arguments)) is None:
        return of_transformers.sdpa_mask()(**arguments)
    return None if mask.all() else mask


def mask_of_keys(arguments: dict[str, Any]) -> Tensor | None:
    """The attention mask as [batch, 1, 1, keys], from arguments of the mask interface, if only it limits attention."""
    mask, keys = arguments.get("attention_mask"), arguments.get("kv_length")
    window, offset = arguments.get("local_size"), arguments.get("kv_offset", 0)
    only_padding = arguments.get("allow_is_bidirectional_skip") and (window is None or keys < window)
    if mask is None or not only_padding or offset or mask.shape[1:] != (keys,):
        return None
    return mask.view(len(mask), 1, 1, keys)


class CpuDropout(nn.Dropout):
    """`nn.Dropout` by `drop_out`."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, of which some numbers are zero and the others larger."""
        return drop_out(input, self.p) if self.training else input


def use_cpu_dropout(model: nn.Module) -> None:
    """Give the dropout layers of a model the faster computation, in place."""
    for module in model.modules():
        if type(module) is nn.Dropout and not module.inplace:
            module.__class__ = CpuDropout


def drop_out(values: Tensor, probability: float) -> Tensor:
    """`F.dropout` with other draws: each number is zero with `probability`, or divided by 1 - `probability`.

    The draws come from torch's generator, one 64-bit number for four values. Off a CPU this is `F.dropout`.
    """
    dropped = round(probability * STEPS)
    if values.device.type != "cpu" or not 0 < dropped < STEPS or torch.compiler.is_compiling():
        return F.dropout(values, probability)
    count = values.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    kept = bits.ge_(dropped - STEPS // 2).to(values.dtype).mul_(STEPS / (STEPS - dropped))
    return values * kept.view(values.shape)


def use_packed_attention(model: Any, device: torch.device, precision: str) -> str:
    """Make `model` attend only within documents; returns a description of the method for the user."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, flash_attention)
    AttentionInterface.register(PADDED, padded_attention)
    if why_not := why_not_flash(model.config, device, precision):
        model.set_attn_implementation(PADDED)
        return f"packed without padding, attention over documents padded to the longest of their group ({why_not})"
    model.set_attn_implementation(VARLEN)
    return "packed without padding, attention by FlashAttention"


def why_not_flash(config: Any, device: torch.device, precision: str) -> str:
    """Why a model with this `PretrainedConfig` cannot use FlashAttention; empty if it can."""
    if device.type != "cuda":
        return "no GPU"
    if precision == "no":
        return "full precision"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % 8 or width > WIDEST_HEAD:
        return f"heads of width {width}, not a multiple of 8 up to {WIDEST_HEAD}"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "a GPU older than Ampere"
    return ""


def attention_interface(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """An attention of packed documents in transformers' interface: query [1, heads, T, width], key and value alike.

    The result is [1, T, heads, width]. A token attends to at most `sliding_window` - 1 tokens on each side, as in
    transformers' FlashAttention. The query may have fewer tokens than key and value, those of `queries`: one of each
    document (shared/speed/first_token.py), or some or none (shared/encoders/masked_head.py).
    """

    def attend_to_documents(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        documents: Documents,
        queries: Documents | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        shared = query.shape[1] // key.shape[1]  # key and value of several query heads (EuroBERT) are repeated
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        more = {"dropout": dropout, "scale": scale, "sliding_window": sliding_window}
        return kernel(query, key, value, documents, queries or documents, **more), None

    return attend_to_documents


@attention_interface
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, queries: Documents, **more: Any
) -> Tensor:
    """FlashAttention; with a window, only of all tokens."""
    window = more.pop("sliding_window")
    # Under autocast, rotary positions in float32 make query and key float32. `part[0]` would copy in the backward pass.
    parts = (part.to(value.dtype).transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    out = of_torch_models.flash_attention(
        *parts,
        *(queries.ends, documents.ends, queries.longest, documents.longest),
        window=None if window is None else window - 1,
        **more,
    )
    return out[None]


@attention_interface
def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    queries: Documents,
    *,
    dropout: float,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Attention over padded documents."""
    _, heads, total, width = query.shape
    arrange = lay_out.__wrapped__ if torch.compiler.is_compiling() else lay_out  # Dynamo warns of a cache
    totals = total, key.shape[2]
    rows, query_rows, masks = arrange(documents, queries, totals, heads, heads * width, sliding_window)
    flat = (part.transpose(1, 2).reshape(-1, width) for part in (query, key, value))
    places = (query_rows, rows, rows)
    padded = [at.split(Reorder.apply(part, at.sources, at.places)) for part, at in zip(flat, places, strict=True)]
    out = [attend(q, k, v, mask, dropout, scale) for q, k, v, mask in zip(*padded, masks, strict=True)]
    return query_rows.unpad(out).view(1, total, heads, width)


class Reorder(torch.autograd.Function):
    """The rows of a matrix at `sources`. In the backward pass, only those of the result at `places` have a gradient.

    What attention computes of padding is masked or never read. Reading is faster than adding gradients of 0.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return states.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class PaddedRows(NamedTuple):
    """Where T packed tokens lie in padded rows, one for each document and head, in one or several groups of documents.

    The rows of a group are as long as its longest document. Padding repeats the last token of its row.
    """

    shapes: list[tuple[int, int, int]]
    """Of each group: documents, heads, tokens per row."""
    tokens: list[int]
    """Of each group: packed tokens; together T."""
    sources: Tensor
    """int64 [tokens of all rows]: which one of the T x heads packed tokens each of them is."""
    places: Tensor
    """int64 [T x heads]: which one of the tokens of all rows each packed token is."""

    @classmethod
    def of(cls, groups: list[Documents], total: int, heads: int = 1) -> Self:
        """The rows of neighbouring `groups` of documents with T = `total`; one group does not wait for the device."""
        head = torch.arange(heads, device=groups[0].ends.device)
        shapes = [(len(group.ends) - 1, heads, group.longest) for group in groups]
        tokens = [total] if len(groups) == 1 else [int(group.ends[-1]) for group in groups]
        sources, places, packed, padded = [], [], 0, 0
        for (ends, longest, *_), (documents, *_), size in zip(groups, shapes, tokens, strict=True):
            each = torch.arange(max(size, documents, longest), device=ends.device)
            token = torch.minimum(ends[:-1, None] + each[:longest], ends[1:, None] - 1).clamp_(min=0)
            sources.append((packed + token)[:, None] * heads + head[:, None])  # [documents, heads, longest]
            begin = each[:documents] * (heads * longest) - ends[:-1]  # of the first row of a document
            place = begin.repeat_interleave(ends.diff(), output_size=size) + each[:size]
            places.append((padded + place)[:, None] + head * longest)  # [size, heads]
            packed, padded = packed + size, padded + documents * heads * longest
        return cls(shapes, tokens, *(torch.cat([part.flatten() for part in parts]) for parts in (sources, places)))

    def split(self, rows: Tensor) -> list[Tensor]:
        """The packed tokens at `sources`, [.., width], as [documents, heads, tokens per row, width] of each group."""
        parts = rows.split([math.prod(shape) for shape in self.shapes])
        return [part.view(*shape, rows.shape[-1]) for part, shape in zip(parts, self.shapes, strict=True)]

    def unpad(self, parts: list[Tensor]) -> Tensor:
        """The inverse: the packed tokens [T x heads, width] of the rows of all groups."""
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).index_select(0, self.places)


@lru_cache(maxsize=4)  # by identity of the tensors: the layers of a model share the layout of a micro-batch
def lay_out(
    documents: Documents, queries: Documents, totals: tuple[int, int], heads: int, width: int, window: int | None
) -> tuple[PaddedRows, PaddedRows, list[Tensor | None]]:
    """The padded rows of packed tokens and of their queries, and the mask of each group.

    `totals` are the numbers of queries and of tokens; `width` is that of all heads together.
    """
    starts = [0]
    if documents.ends.device.type == "cpu" and not torch.compiler.is_compiling():
        starts = groups_of_similar_length(documents.ends.diff().tolist(), width)
    groups = query_groups = group_documents(documents, documents, starts)
    rows = query_rows = PaddedRows.of(groups, totals[1], heads)
    if queries is not documents:
        query_groups = group_documents(queries, documents, starts)
        query_rows = PaddedRows.of(query_groups, totals[0], heads)
    masks = [mask_of(*group, window) for group in zip(groups, query_groups, rows.tokens, strict=True)]
    return rows, query_rows, masks


def groups_of_similar_length(lengths: list[int], width: int) -> list[int]:
    """The first document of each group of neighbours that are padded to the same length.

    Args:
        lengths: of the documents of a micro-batch in tokens, sorted, also in several sequences.
        width: of all heads together.
    """
    starts, longest = [0], lengths[0]
    for document, length in enumerate(lengths):
        work = (document - starts[-1]) * longest**2 * width
        if work >= ENOUGH_WORK and not SIMILAR * longest <= length <= longest / SIMILAR:
            starts.append(document)
            longest = length
        longest = max(longest, length)
    return starts


def group_documents(of: Documents, documents: Documents, starts: list[int]) -> list[Documents]:
    """The documents of each group as those of a row of their own; `of`: `documents`, or their tokens with a query."""
    if len(starts) == 1:
        return [of]
    ends = [*starts[1:], len(documents.ends) - 1]
    found = []
    for start, end in zip(starts, ends, strict=True):
        own = of.ends[start : end + 1]
        places = None if of.places is None else of.places[own[0] : own[-1]] - documents.ends[start]
        found.append(Documents(own - own[0], int(own.diff().max()), places))
    return found


def mask_of(documents: Documents, queries: Documents, tokens: int, sliding_window: int | None) -> Tensor | None:
    """Whether a query of a group attends to a token: bool [documents, 1, queries or 1, longest]. None: to all.

    Args:
        documents, queries: of the group; see `attention_interface`.
        tokens: of its documents.
    """
    (ends, longest, *_), count = documents, len(documents.ends) - 1
    place = torch.arange(longest, device=ends.device)
    mask = None if count * longest == tokens else (place < ends.diff()[:, None])[:, None, None]
    if sliding_window is None or longest <= sliding_window:
        return mask
    own = place[:, None]
    if queries.places is not None:
        total = len(queries.places)
        places = queries.places - ends[:-1].repeat_interleave(queries.ends.diff(), output_size=total)
        own = places[PaddedRows.of([queries], total).sources].view(count, 1, queries.longest, 1)
    near = (own - place).abs() < sliding_window
    mask = near if mask is None else mask & near
    # A padding token may have nothing in its window, which gives NaN in torch's kernel: it attends to itself.
    return mask | torch.eye(longest, dtype=torch.bool, device=ends.device) if queries.places is None else mask
