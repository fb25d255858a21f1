"""Packing: all documents of a micro-batch in one row without padding, and attention only within each document.

The model gets one row of all tokens, positions that restart with each document, and the boundaries of the documents.
Positions alone would not be enough, because by default each token attends to the whole row. Two attention functions
are therefore registered with transformers:

- "packed_varlen": FlashAttention with document boundaries, on CUDA in half precision.
- "packed_padded": everywhere else. Documents are padded to the longest of the micro-batch, but only for attention. The
  plan sorts them by length, so the padding is short. A CPU computes groups of similar length one after the other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.compat import of_torch_models, of_transformers
from shared.encoders.attention import attend
from shared.encoders.padding import pad_rows
from shared.pretrained.tokenizers import OFFSET_POSITIONS
from shared.speed.first_token import Documents
from shared.speed.self_check import outputs_of, packed_text_batch, same
from shared.text.tokenized import Item, Padding, Rows, joined

WIDEST_HEAD, AMPERE = 256, (8, 0)  # limits of FlashAttention
PADDED, VARLEN = "packed_padded", "packed_varlen"  # transformers loads a kernel where a name has "flash" in it
SIMILAR = 0.8  # a group of enough work ends before a document that is this much shorter than its longest, or longer
ENOUGH_WORK = 2**21  # documents x squared length x width: about a millisecond, ten times the cost of calling kernels


@dataclass(frozen=True)
class Packing:
    """Collates texts: one row without padding."""

    first_position: int = 0
    packed: ClassVar[bool] = True

    @classmethod
    def for_model(cls, config: Any) -> Self:
        """For a model with this `PretrainedConfig`: models like RoBERTa count positions from the padding id + 1."""
        return cls(config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0)

    def padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cost of documents in tokens, int64 [N]: their lengths, because nothing is padded."""
        return lengths

    def __call__(self, rows: Rows | list[Item]) -> dict[str, Any]:
        """`arguments`, token_type_ids [1, T] if there are any, and labels [texts, …].

        If single tokens have targets: labels [n], and these tokens in `documents`. Otherwise the model has a head that
        gets rows: attention_mask [texts, longest].
        """
        lengths, ids, types, targets, masked = rows if isinstance(rows, tuple) else joined(rows)
        batch = self.arguments(ids, lengths)
        if types is not None:
            batch["token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
        if targets is not None:
            batch["labels"] = torch.from_numpy(targets)
        if masked is None:
            batch["attention_mask"] = mask_of_rows(lengths)
        else:
            ends = np.searchsorted(masked, batch["documents"].ends.numpy()).astype(np.int32)
            of_masked = Documents(torch.from_numpy(ends), int(np.diff(ends).max()), torch.from_numpy(masked))
            batch["documents"] = batch["documents"]._replace(masked=of_masked)
        return batch

    def arguments(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> dict[str, Any]:
        """The arguments of the model, for the `tokens` [T] of documents of these `lengths` [documents].

        input_ids and position_ids [1, T], and the `Documents`.
        """
        ends = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(len(tokens)) - np.repeat(ends[:-1], lengths) + self.first_position
        return {
            "input_ids": torch.from_numpy(tokens.astype(np.int64, copy=False))[None],
            "position_ids": torch.from_numpy(positions)[None],
            "documents": Documents(torch.from_numpy(ends.astype(np.int32)), int(lengths.max())),
        }


def mask_of_rows(lengths: NDArray[np.int64]) -> Tensor:
    """int64 [texts, longest]: 1 for each token. A head needs it that computes the mean of all tokens of a text."""
    return torch.from_numpy((np.arange(int(lengths.max())) < lengths[:, None]).astype(np.int64))


def packing_is_exact(model: Any, in_rows: bool = False) -> bool:
    """Whether packed documents have the same outputs as each one alone; with `in_rows`, the head of a model gets rows.

    A few documents are computed both ways. Attention is not the only connection between tokens in all models: in a
    MobileBERT, each token also uses the embeddings of its neighbours. The packed attention is never causal.
    """
    before = of_transformers.attention_name(model.config) if of_transformers.takes_registered_attention(model) else None
    if before is None or any(getattr(module, "is_causal", False) for module in model.modules()):
        return False
    tokens, lengths = packed_text_batch(model.config)
    rows = torch.from_numpy(tokens).split(lengths.tolist())
    alone = [outputs_of(model, {"input_ids": ids[None]}) for ids in rows]
    packed = Packing.for_model(model.config).arguments(tokens, lengths)
    packed |= {"attention_mask": mask_of_rows(lengths)} if in_rows else {}
    use_packed_attention(model, torch.device("cpu"), "no")
    try:
        together = [  # each output is [1, T, ...] of packed tokens, or has one row for each document
            output if len(output) == len(lengths) else output[0].split(lengths.tolist())
            for output in outputs_of(model, packed)
        ]
    except Exception:  # any model: one may not pass the documents on to its attention
        return False
    finally:
        model.set_attn_implementation(before)
    pairs = (
        (row[: len(expected[0])], expected[0])  # padding follows
        for document, found in zip(alone, zip(*together, strict=True), strict=True)
        for row, expected in zip(found, document, strict=True)
    )
    return all(row.shape == expected.shape and same(row, expected) for row, expected in pairs)


def pack_or_pad(
    model: Any,
    data: Any,
    tokenizer: Any,
    accelerator: Any,
    config: Any,
    exact: Callable[[Any], bool] = packing_is_exact,
) -> tuple[Padding | Packing, str]:
    """The collate function for the texts of `data` according to --packing, and a description of it for the user.

    If packed texts would attend to each other in this model, each has its own row, with padding.

    Args:
        exact: whether the model can be packed; `unpack_before_head` for classifiers.

    Raises:
        UserError: see `pad_rows`.
    """
    if config.packing and exact(model):
        precision = config.activation_dtype or config.mixed_precision
        return Packing.for_model(model.config), use_packed_attention(model, accelerator.device, precision)
    collate, padding = pad_rows(model, data, tokenizer, config)
    why = f", because a {type(model).__name__} cannot be packed exactly" if config.packing else ""
    return collate, f"one text per row{why}{padding}"


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
    out = of_torch_models.flash_attention(
        *(
            part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)
        ),  # `part[0]` would copy in the backward pass
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
    starts = [0]
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        starts = groups_of_similar_length(documents.ends.diff().tolist(), heads * width)
    groups = query_groups = group_documents(documents, documents, starts)
    rows = query_rows = PaddedRows.of(groups, key.shape[2], heads)
    if queries is not documents:
        query_groups = group_documents(queries, documents, starts)
        query_rows = PaddedRows.of(query_groups, total, heads)
    query, key, value = (part.transpose(1, 2).reshape(-1, width) for part in (query, key, value))
    masks = [mask_of(*group, sliding_window) for group in zip(groups, query_groups, rows.tokens, strict=True)]
    parts = zip(query_rows.pad(query), rows.pad(key), rows.pad(value), masks, strict=True)
    out = [attend(*part, dropout, scale) for part in parts]
    return query_rows.unpad(out).view(1, total, heads, width)


class PaddedRows(NamedTuple):
    """Where T packed tokens lie in padded rows, one for each document and head, in one or several groups of documents.

    The rows of a group are as long as its longest document. Padding repeats the last token of its row. What is computed
    of it is masked or never read.
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

    def pad(self, states: Tensor) -> list[Tensor]:
        """[T x heads, width] as [documents, heads, tokens per row, width] of each group."""
        rows = states.index_select(0, self.sources).split([math.prod(shape) for shape in self.shapes])
        return [part.view(*shape, states.shape[-1]) for part, shape in zip(rows, self.shapes, strict=True)]

    def unpad(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `pad`."""
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).index_select(0, self.places)


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
