"""One forward's packed rows, as both engines describe them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from h3_kernels.errors import InputError
from h3_kernels.logical_keys import LogicalKeys

_INT64 = ("video_positions", "audio_positions", "text_positions", "tags", "timestep_index")


@dataclass(frozen=True, slots=True, eq=False)
class PackedInputs:
    """T packed rows of one or more documents, and the embeddings' sources.

    ``video`` [Nv, channels * patch] and ``audio`` [Na, channels]: latent rows, condition rows included;
    ``text`` [Nt, text_dim]. ``*_positions`` [N*] int64: the packed row of each of them. ``positions`` [T, 3]:
    (t, h, w). ``tags`` [T] int64: 0 video, 1 text, 2 audio, -1 padding. ``timesteps`` [M] in [0, 1] and
    ``timestep_index`` [T] int64: the row's noise level. ``cu_seqlens`` int32 [documents + 1] over the packed
    rows, ``text_cu_seqlens`` over the text rows (the token refiner's documents); ``max_seqlen`` and
    ``text_max_seqlen`` their longest, host integers. ``keys``: logical keys of the packed rows, or None.
    """

    video: Tensor
    audio: Tensor
    text: Tensor
    video_positions: Tensor
    audio_positions: Tensor
    text_positions: Tensor
    positions: Tensor
    tags: Tensor
    timesteps: Tensor
    timestep_index: Tensor
    cu_seqlens: Tensor
    text_cu_seqlens: Tensor
    max_seqlen: int
    text_max_seqlen: int
    keys: LogicalKeys | None = None
    rope: Tensor | None = None
    _row_keys: dict[str, LogicalKeys] = field(default_factory=dict, init=False, repr=False)
    _canonical: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        rows = self.rows
        for name in _INT64:
            if getattr(self, name).dtype != torch.int64:
                raise InputError(f"{name} is {getattr(self, name).dtype}; expected int64")
        for name in ("tags", "timestep_index"):
            if tuple(getattr(self, name).shape) != (rows,):
                raise InputError(
                    f"{name} is {list(getattr(self, name).shape)}; expected [{rows}], one per packed row"
                )
        for name in ("video", "audio", "text"):
            source, places = getattr(self, name), getattr(self, f"{name}_positions")
            if source.dim() != 2 or places.shape != source.shape[:1]:
                raise InputError(
                    f"{name} {list(source.shape)} does not fit its positions {list(places.shape)}"
                )
        if self.keys is not None:
            self.keys.check_rows(rows)

    @property
    def rows(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    def row_keys(self, rows: str) -> LogicalKeys | None:
        """Keys of the ``packed``, ``video``, ``audio`` or ``text`` rows; None without keys and for ``time``
        rows.
        """
        if self.keys is None or rows == "time":
            return None
        if rows == "packed":
            return self.keys
        if rows not in self._row_keys:
            places = getattr(self, f"{rows}_positions")
            self._row_keys[rows] = LogicalKeys(self.keys.keys.index_select(0, places))
        return self._row_keys[rows]

    def canonical(self) -> PackedInputs:
        """The same rows in ascending key order inside each document, padding last: what attention then folds over.

        Outputs are selected by position, so they keep the order of ``video`` and ``audio``. Two packings that differ
        by a permutation of rows inside documents become one. Without keys, returns self.
        """
        if self.keys is None or self._canonical:
            return self
        sorted_rows = self if self.keys.order is None else self._sorted(self.keys)
        text_order = _document_order(sorted_rows.text_positions.unsqueeze(1), self.text_cu_seqlens)
        laid = replace(
            sorted_rows,
            text=self.text[text_order],
            text_positions=sorted_rows.text_positions[text_order],
        )
        object.__setattr__(laid, "_canonical", True)
        return laid

    def fixed(self) -> Hashable:
        """What a graph captured over these rows has fixed: shapes, dtypes, the host's numbers, the order of the keys.

        With keys that do not ascend as the rows lie, reads their order back.
        """
        return self.shapes(), self.max_seqlen, self.text_max_seqlen, self._orders()

    def shapes(self) -> Hashable:
        """Shape, dtype and device of every tensor."""
        given = (getattr(self, name) for name in TENSORS)
        return tuple(None if t is None else (t.shape, t.dtype, t.device) for t in given)

    def _orders(self) -> Hashable:
        if self.keys is None:
            return None
        found = (self.row_keys(rows) for rows in _ROW_SETS)
        orders = (None if keys is None else keys.order for keys in found)
        return tuple(None if order is None else order.cpu().numpy().tobytes() for order in orders)

    def own(self) -> PackedInputs:
        """The same rows in memory of their own, without gradients, under the same keys."""
        given = {name: getattr(self, name) for name in TENSORS}
        copies: dict[str, Any] = {n: None if t is None else t.detach().clone() for n, t in given.items()}
        copy = replace(self, **copies)
        copy._row_keys.update(self._row_keys)
        object.__setattr__(copy, "_canonical", self._canonical)
        return copy

    def fill(self, given: PackedInputs) -> None:
        """Copy the values of ``given``, whose shapes are the same, into these tensors."""
        for name in TENSORS:
            mine, theirs = getattr(self, name), getattr(given, name)
            if mine is not None:
                mine.copy_(theirs)

    def _sorted(self, keys: LogicalKeys) -> PackedInputs:
        order = _document_order(keys.keys, self.cu_seqlens)
        place = torch.empty_like(order)
        place[order] = torch.arange(self.rows, device=order.device)
        return replace(
            self,
            video_positions=place[self.video_positions],
            audio_positions=place[self.audio_positions],
            text_positions=place[self.text_positions],
            positions=self.positions[order],
            tags=self.tags[order],
            timestep_index=self.timestep_index[order],
            keys=LogicalKeys(keys.keys[order]),
            rope=None if self.rope is None else self.rope[order],
        )


TENSORS = tuple(f.name for f in fields(PackedInputs) if f.type in {"Tensor", "Tensor | None"})
_ROW_SETS = ("packed", "text", "video", "audio")


def _document_order(keys: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Permutation that sorts rows by (document, padding last, key columns)."""
    rows = torch.arange(keys.shape[0], device=keys.device)
    document = torch.bucketize(rows, cu_seqlens[1:].to(torch.int64), right=True)
    order = rows
    for column in (*reversed(keys.unbind(1)), (keys[:, 0] < 0).to(torch.int64), document):
        order = order[torch.argsort(column[order], stable=True)]
    return order


def diffusers_inputs(kwargs: Mapping[str, Any], keys: LogicalKeys | None = None) -> PackedInputs:
    """From the keyword arguments of Diffusers' ``MiniMaxH3Transformer3DModel.forward``.

    The batch axis replicates one layout, so item b becomes document b. ``keys``: of the B * S packed rows.
    Raises InputError on shapes that do not fit.
    """
    positions: Tensor = kwargs["position_ids"]
    batch, length = kwargs["hidden_states"].shape[0], positions.shape[0]
    texts = kwargs["text_indices"].shape[0]

    def places(name: str) -> Tensor:
        starts = torch.arange(batch, device=positions.device) * length
        indices: Tensor = kwargs[f"{name}_indices"]
        return torch.add(starts[:, None], indices[None]).flatten()

    def bounds(count: int) -> Tensor:
        return torch.arange(batch + 1, device=positions.device, dtype=torch.int32) * count

    return PackedInputs(
        video=kwargs["hidden_states"].flatten(0, 1),
        audio=kwargs["audio_hidden_states"].flatten(0, 1),
        text=kwargs["encoder_hidden_states"].flatten(0, 1),
        video_positions=places("video"),
        audio_positions=places("audio"),
        text_positions=places("text"),
        positions=positions.repeat(batch, 1),
        tags=kwargs["token_tags"].repeat(batch),
        timesteps=kwargs["timestep"],
        timestep_index=kwargs["timestep_indices"].repeat(batch),
        cu_seqlens=bounds(length),
        text_cu_seqlens=bounds(texts),
        max_seqlen=length,
        text_max_seqlen=texts,
        keys=keys,
    )


def _field(info: Any, name: str) -> Any:
    """A field of what the engine hands over as a mapping or as an object; None if it has none."""
    return info.get(name) if isinstance(info, Mapping) else getattr(info, name, None)


def vllm_inputs(kwargs: Mapping[str, Any], keys: LogicalKeys | None = None) -> PackedInputs:
    """From the keyword arguments of vLLM-Omni's ``MiniMaxH3DiTModel.forward``.

    Latent rows lie inside packed ``x`` [1, T, C] and ``audio_x``; ``cu_seqlens_q`` gives documents, alignment
    padding being one of them. Masks (``update_mask``) stay with the caller: velocities of condition rows are
    returned. Raises InputError on shapes that do not fit.
    """
    x, audio_x = kwargs["x"], kwargs["audio_x"]
    device = x.device

    def places(name: str) -> Tensor:
        ids: Tensor = _field(kwargs[name], "position_ids")
        return ids.view(-1).to(device=device, dtype=torch.int64)

    def documents(name: str) -> tuple[Tensor, int, int]:
        bounds, longest, requests = (
            _field(kwargs[name], f) for f in ("cu_seqlens_q", "max_seqlen_q", "num_requests")
        )
        return bounds.to(device=device, dtype=torch.int32), int(longest), int(requests or 1)

    video, audio, text = (places(f"{name}_pos_info") for name in ("img", "audio", "text"))
    cu_seqlens, max_seqlen, requests = documents("packed_seq_params")
    text_cu_seqlens, text_max_seqlen, _ = documents("refiner_packed_seq_params")
    if cu_seqlens.shape[0] - 1 > requests:
        # Alignment padding is a document that the engine leaves out of max_seqlen_q. The longest request and a row for
        # each other one bound it without reading the device.
        max_seqlen = max(max_seqlen, x.shape[1] - max_seqlen - (requests - 1))
    return PackedInputs(
        video=x.flatten(0, 1).index_select(0, video),
        audio=audio_x.flatten(0, 1).index_select(0, audio),
        text=kwargs["prompt_embeds"].to(device),
        video_positions=video,
        audio_positions=audio,
        text_positions=text,
        positions=kwargs["img_position_ids"][0].to(device),
        tags=kwargs["token_tags"].view(-1).to(device=device, dtype=torch.int64),
        timesteps=kwargs["unique_timesteps"].view(-1).to(device),
        timestep_index=kwargs["inverse_indices"].view(-1).to(device=device, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        text_cu_seqlens=text_cu_seqlens,
        max_seqlen=max_seqlen,
        text_max_seqlen=text_max_seqlen,
        keys=keys,
    )
