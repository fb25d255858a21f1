"""Packing: all documents of a micro-batch in one row without padding, and attention only within each document.

The model gets one row of all tokens, positions that restart with each document, and the boundaries of the documents.
Positions alone would not be enough, because by default each token attends to the whole row. Two attention functions
are therefore registered with transformers:

- "packed_varlen": `torch.nn.attention.varlen`, FlashAttention with document boundaries, on CUDA in half precision.
- "packed_padded": everywhere else. Documents are padded to the longest of the micro-batch, but only for attention. The
  plan sorts them by length, so the padding is short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.compat import of_transformers
from shared.encoders.attention import attend
from shared.encoders.padding import TRIAL_TOKENS, padding_for
from shared.errors import UserError
from shared.models.layers import is_short
from shared.plan.fixed_shapes import FixedShapes
from shared.pretrained.tokenizers import OFFSET_POSITIONS
from shared.speed.first_token import MASKED, MASKED_ENDS, MOST_MASKED
from shared.speed.self_check import outputs_of, same
from shared.text.tokenized import Padding

DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")  # varlen attention supports no dropout
WIDEST_HEAD, AMPERE = 256, (8, 0)  # limits of FlashAttention, which varlen attention calls
FLASH_3 = "FA3"  # torch's name of FlashAttention-3
PADDED, VARLEN = "packed_padded", "packed_varlen"
Read = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Packing:
    """Makes a batch from the result of `MaskedDocuments.read_micro_batch`: one row without padding."""

    first_position: int = 0
    pad_token_id: int = 0
    shapes: FixedShapes | None = None
    """With shapes, each micro-batch is filled up to them."""
    only_masked: bool = False
    """Whether the last layer computes masked tokens only (`compute_only_masked`), and needs their boundaries."""
    packed: ClassVar[bool] = True

    @classmethod
    def for_model(cls, config: Any, shapes: FixedShapes | None = None, only_masked: bool = False) -> Self:
        """For a model with this `PretrainedConfig`: models like RoBERTa count positions from the padding id + 1."""
        first = config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
        return cls(first, config.pad_token_id or 0, shapes, only_masked)

    def padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cost of documents in tokens, int64 [N]: their lengths, because nothing is padded."""
        return lengths

    def __call__(self, read: Read) -> dict[str, Any]:
        """`arguments`, masked [n] (indices of the masked tokens in the row) and labels [n] (their original ids).

        With `only_masked`, also cu_seq_lens_masked int32 [documents + 1], the boundaries of the documents in `masked`,
        and max_length_masked, the largest number of masked tokens in a document.
        """
        tokens, lengths, masked, labels = read
        batch = self.arguments(tokens, lengths) | {
            MASKED: torch.from_numpy(masked),
            "labels": torch.from_numpy(labels),
        }
        if self.only_masked and len(masked):
            ends = np.searchsorted(masked, np.append(0, np.cumsum(lengths))).astype(np.int32)
            batch |= {MASKED_ENDS: torch.from_numpy(ends), MOST_MASKED: int(np.diff(ends).max())}
        return batch

    def arguments(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> dict[str, Any]:
        """The arguments of the model, for the `tokens` [T] of documents of these `lengths` [documents].

        input_ids and position_ids [1, T], cu_seq_lens_q and _k int32 [documents + 1], max_length_q and _k. With
        `shapes`, T and the number of documents include the filling, which follows these documents.
        """
        ends, longest = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.max())
        if self.shapes:
            filling, ends, longest = self.shapes.fill(lengths)
            tokens = np.concatenate([tokens, np.full(filling.sum(), self.pad_token_id)])
            lengths = np.concatenate([lengths, filling])
        positions = np.arange(len(tokens)) - np.repeat(ends[: len(lengths)], lengths) + self.first_position
        boundaries = torch.from_numpy(ends.astype(np.int32))
        return {
            "input_ids": torch.from_numpy(tokens.astype(np.int64, copy=False))[None],
            "position_ids": torch.from_numpy(positions)[None],
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }


@dataclass(frozen=True)
class OnePerRow(Padding):
    """Makes a batch from the result of `MaskedDocuments.read_micro_batch`: one document per row, with padding."""

    def __call__(self, read: Read) -> dict[str, Any]:  # type: ignore[override]  # takes other items than `Padding`
        """input_ids and attention_mask [rows, longest], masked [n] (indices in the flattened rows) and labels [n]."""
        tokens, lengths, masked, labels = read
        longest = int(self.padded_lengths(lengths).max())
        begins = np.cumsum(lengths) - lengths
        row = np.repeat(np.arange(len(lengths)), lengths)
        where = row * longest + np.arange(len(tokens)) - begins[row]  # index of each token in the flattened rows
        ids = np.full(len(lengths) * longest, self.pad_token_id)
        real = np.zeros(len(ids), np.int64)
        ids[where], real[where] = tokens, 1
        shape = (len(lengths), longest)
        return {
            "input_ids": torch.from_numpy(ids.reshape(shape)),
            "attention_mask": torch.from_numpy(real.reshape(shape)),
            "masked": torch.from_numpy(where[masked]),
            "labels": torch.from_numpy(labels),
        }


def pack_or_pad(model: Any, data: Any, tokenizer: Any, accelerator: Any, config: Any) -> tuple[Any, str]:
    """The collate function for the pieces of `data` according to --packing, and a description of it for the user.

    If packed documents would attend to each other in this model, it gets one document per row.

    Raises:
        UserError: --fixed_shapes, and the model cannot be packed; see also `FixedShapes.of_run`.
    """
    how, rows = "one document per row, sorted by length", [data[i] for i in range(min(len(data), 3))]
    shapes = FixedShapes.of_run(config)
    if config.packing and packing_is_exact(model, [row[:TRIAL_TOKENS] for row in rows], filled=shapes is not None):
        return Packing.for_model(model.config, shapes, is_short(model)), pack(model, accelerator, config, shapes)
    refuse_fixed_shapes(model, shapes)
    if config.packing:
        how += f" (if packed, documents would attend to each other in a {type(model).__name__})"
    multiple, padding = padding_for(model, rows[0], tokenizer, config)
    return OnePerRow(tokenizer.pad_token_id, multiple, config.max_length), how + padding


def pack(model: Any, accelerator: Any, config: Any, shapes: FixedShapes | None) -> str:
    """Make `model` attend only within documents; returns a description for the user.

    With --attention, shared/encoders/attention_choice.py sets the kernels later, and the launch card has a row on them.
    """
    how = use_packed_attention(model, accelerator.device, config.activation_dtype or config.mixed_precision)
    if getattr(config, "attention", None):
        how = "packed without padding"
    return how + (f"; filled up to {shapes.tokens:,} tokens in {shapes.documents:,} documents" if shapes else "")


def refuse_fixed_shapes(model: Any, shapes: FixedShapes | None) -> None:
    """Refuse --fixed_shapes for a model that cannot be packed.

    Raises:
        UserError: there are `shapes`.
    """
    if shapes:
        raise UserError(
            f"--fixed_shapes has no effect, because a {type(model).__name__} cannot be packed: leave it out"
        )


def packing_is_exact(
    model: Any, rows: Sequence[NDArray[np.int64]], packing: type[Packing] = Packing, filled: bool = False
) -> bool:
    """Whether documents, given by their token ids, have the same outputs when `packing` packs them as each one alone.

    A few documents are computed both ways; `filled`: with filling, as --fixed_shapes adds it. Attention is not the only
    connection between tokens in all models: in a MobileBERT, each token also uses the embeddings of its neighbours. The
    packed attention is never causal.
    """
    before = of_transformers.attention_name(model.config) if of_transformers.takes_registered_attention(model) else None
    if before is None or any(getattr(module, "is_causal", False) for module in model.modules()):
        return False
    alone = [outputs_of(model, {"input_ids": torch.from_numpy(ids)[None]}) for ids in rows]
    lengths = np.array([len(ids) for ids in rows])
    shapes = FixedShapes.for_trial(lengths) if filled else None
    packed = packing.for_model(model.config, shapes).arguments(np.concatenate(rows), lengths)
    use_packed_attention(model, torch.device("cpu"), "no")
    try:
        together = [by_document(output, lengths) for output in outputs_of(model, packed)]
    except Exception:  # any model: one may not pass the boundaries on to its attention
        return False
    finally:
        model.set_attn_implementation(before)
    pairs = (
        (row[: len(expected[0])], expected[0])  # padding follows
        for document, found in zip(alone, zip(*together, strict=True), strict=True)
        for row, expected in zip(found, document, strict=True)
    )
    return all(row.shape == expected.shape and same(row, expected) for row, expected in pairs)


def by_document(output: Tensor, lengths: NDArray[np.int64]) -> list[Tensor]:
    """The output for each of several documents, without what belongs to the filling after them.

    Args:
        output: [1, T, ...] of packed tokens, or one row for each document.
        lengths: of the documents, in tokens.
    """
    if len(output) == 1 and len(lengths) > 1:
        return [*output[0, : lengths.sum()].split(lengths.tolist())]
    return [*output[: len(lengths)]]


def use_packed_attention(model: Any, device: torch.device, precision: str) -> str:
    """Make `model` attend only within documents; returns a description of the method for the user."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionInterface.register(PADDED, padded_attention)
    activate_flash_3(False)
    if why_not := why_not_varlen(model.config, device, precision):
        model.set_attn_implementation(PADDED)
        return f"packed without padding, attention over each micro-batch's documents padded to the longest ({why_not})"
    model.set_attn_implementation(VARLEN)
    return "packed without padding, attention by torch.nn.attention.varlen"


def activate_flash_3(wanted: bool) -> None:
    """Make torch use FlashAttention-3 in this process, or its own version, which an earlier run may have replaced."""
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)() == FLASH_3
    if wanted and not active:
        attention.activate_flash_attention_impl(FLASH_3)
    elif active and not wanted:
        attention.restore_flash_attention_impl()


def why_not_varlen(config: Any, device: torch.device, precision: str) -> str:
    """Why a model with this `PretrainedConfig` cannot use torch.nn.attention.varlen; empty if it can."""
    if device.type != "cuda":
        return "no GPU"
    if precision == "no":
        return "full precision"
    if any(isinstance(value := getattr(config, name, 0.0), float) and value > 0 for name in DROPOUTS):
        return "dropout of attention"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % 8 or width > WIDEST_HEAD:
        return f"heads of width {width}, not a multiple of 8 up to {WIDEST_HEAD}"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "a GPU older than Ampere"
    return "" if has_varlen() else f"torch {torch.__version__} has no torch.nn.attention.varlen"


def has_varlen() -> bool:
    """Whether this version of torch has torch.nn.attention.varlen."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401  # only tries the import
    except ImportError:
        return False
    return True


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, width], key and value alike -> [1, T, heads, width].

    The query may have fewer tokens than key and value, but only without a window: one of each document
    (shared/speed/first_token.py), or some or none (shared/encoders/masked_head.py).
    """
    from torch.nn.attention.varlen import varlen_attn

    key, value = repeat_kv_heads(query, key, value)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    out = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scale=scaling, window_size=window
    )
    assert isinstance(out, Tensor)
    return out[None], None


def padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    masked: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, width], key and value alike -> [1, T, heads, width].

    A token attends to at most `sliding_window` - 1 tokens on each side, as in transformers' FlashAttention. The query
    may have fewer tokens than key and value: one of each document (shared/speed/first_token.py, without a window), or
    those at `masked` [n], of which a document may have none (shared/encoders/masked_head.py).
    """
    key, value = repeat_kv_heads(query, key, value)
    documents, longest = len(cu_seq_lens_k) - 1, max_length_k
    heads, total, width = query.shape[1:]
    slots = padded_slots(cu_seq_lens_k, longest, key.shape[2])
    query_slots = slots if total == key.shape[2] else padded_slots(cu_seq_lens_q, max_length_q, total)

    def pad(part: Tensor, slots: Tensor | None, longest: int) -> Tensor:
        flat = part[0].transpose(0, 1)  # [T, heads, width]
        if slots is not None:
            flat = flat.new_zeros(documents * longest, heads, width).index_copy(0, slots, flat)
        return flat.view(documents, longest, heads, width).transpose(1, 2)

    mask = None
    if slots is not None:
        lengths = cu_seq_lens_k.diff().clamp(min=1)  # attention to nothing, in an empty document, would give NaN
        mask = (torch.arange(longest, device=query.device) < lengths[:, None])[:, None, None]
    if sliding_window is not None and longest > sliding_window:
        place = torch.arange(longest, device=query.device)
        if total == key.shape[2]:
            window = (place[:, None] - place).abs() < sliding_window
            # A padding token may have nothing in its window, which would give NaN: it attends to itself.
            itself = torch.eye(longest, dtype=torch.bool, device=query.device)
            mask = window if mask is None else (mask & window) | itself
        else:
            assert masked is not None, "the places of the queries are known"
            begins = cu_seq_lens_k[:-1].repeat_interleave(cu_seq_lens_q.diff(), output_size=total)
            own = masked - begins  # the place of each query in its document; that of a padding query is 0
            if query_slots is not None:
                own = own.new_zeros(documents * max_length_q).index_copy(0, query_slots, own)
            window = (own.view(documents, 1, max_length_q, 1) - place).abs() < sliding_window
            mask = window if mask is None else mask & window
    padded = pad(query, query_slots, max_length_q), pad(key, slots, longest), pad(value, slots, longest)
    out = attend(*padded, mask, dropout, width**-0.5 if scaling is None else scaling)
    out = out.transpose(1, 2).reshape(-1, heads, width)
    return (out if query_slots is None else out.index_select(0, query_slots))[None], None


def padded_slots(ends: Tensor, longest: int, total: int) -> Tensor | None:
    """The index of each of `total` packed tokens in the flattened rows [documents, longest]; None if all are full.

    `ends` [documents + 1] are the boundaries of the documents.
    """
    documents = len(ends) - 1
    if documents * longest == total:
        return None
    padding_before = torch.arange(documents, device=ends.device) * longest - ends[:-1]
    slots = torch.arange(total, device=ends.device)
    return slots + padding_before.repeat_interleave(ends.diff(), output_size=total)  # does not wait for the device


def repeat_kv_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [1, heads, T, width]: those shared by several query heads (EuroBERT) are repeated."""
    shared = query.shape[1] // key.shape[1]
    return (key, value) if shared == 1 else (key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))
