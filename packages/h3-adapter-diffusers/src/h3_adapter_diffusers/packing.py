"""One request's packed sequence, as both engines describe it, and the logical identity of its rows.

H3 runs full attention over one sequence of text, condition, audio and video rows. A rollout hands its layout
over as tensors (verl-omni's `h3_*` fields); replay needs the same layout, the same per-row timesteps and, for
gradients, an identity of every row that survives packing, padding and batching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h3_adapter_diffusers.errors import ReplayError

VIDEO_CONDITION_TIMESTEP = 0.999
"""Video condition rows are held at `max(t, 0.999)`: `MINIMAX_H3_IMGVID_COND_TIMESTEP` in vLLM-Omni's denoise
loop, `keyframe_noise_aug` in Diffusers' pipeline. A test compares all three."""
AUDIO_CONDITION_TIMESTEP = 1.0
"""Audio reference rows are clean: `MINIMAX_H3_AUDIO_REF_COND_TIMESTEP` in vLLM-Omni."""

_SEQUENCE, _TIME = 0, 1  # second column of a logical key: rows of the sequence, or distinct timesteps

_LAYOUT = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
"""Fields of a PackedSequence that Diffusers' forward takes, under the same names."""

_FIELDS = (*_LAYOUT, "video_update_mask")


@dataclass(frozen=True)
class PackedSequence:
    """The layout of one request of S rows.

    `position_ids` [S, 3] float64 or float32 `(t, h, w)`; `token_tags` [S] int64 (0 video, 1 text, 2 audio);
    `text_indices`, `video_indices`, `audio_indices` int64, together a partition of 0..S-1, condition rows
    first within video and audio; `video_generated` [Nv] and `audio_generated` [Na] bool, False for condition
    rows. `order` [S] int64 is each row's place in the layout the rollout ran, a permutation of 0..S-1; None
    if this is that layout. Raises ReplayError when these do not describe one sequence.
    """

    position_ids: Tensor
    token_tags: Tensor
    text_indices: Tensor
    video_indices: Tensor
    audio_indices: Tensor
    video_generated: Tensor
    audio_generated: Tensor
    order: Tensor | None = None

    def __post_init__(self) -> None:
        length = self.position_ids.shape[0]
        if self.position_ids.shape != (length, 3) or self.token_tags.shape != (length,):
            raise ReplayError(
                f"position_ids must be [S, 3] and token_tags [S], got {tuple(self.position_ids.shape)} and"
                f" {tuple(self.token_tags.shape)}"
            )
        covered = torch.cat((self.text_indices, self.video_indices, self.audio_indices))
        if covered.shape != (length,) or not torch.equal(
            covered.sort().values, torch.arange(length).to(covered)
        ):
            raise ReplayError(
                f"text ({len(self.text_indices)}), video ({len(self.video_indices)}) and audio"
                f" ({len(self.audio_indices)}) indices must cover each of the {length} packed rows once;"
                " strip padding with h3_seq_len before replay"
            )
        if self.order is not None and not torch.equal(
            self.order.sort().values, torch.arange(length).to(self.order)
        ):
            raise ReplayError(
                f"order must be a permutation of 0..{length - 1}: each row's place in the rollout's layout"
            )
        for name in ("video", "audio"):
            indices, generated = getattr(self, f"{name}_indices"), getattr(self, f"{name}_generated")
            if generated.shape != indices.shape or generated.dtype != torch.bool:
                raise ReplayError(
                    f"{name}_generated must be bool [{len(indices)}],"
                    f" got {generated.dtype} {tuple(generated.shape)}"
                )

    @classmethod
    def from_layout(cls, layout: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]) -> PackedSequence:
        """From the seven values that Diffusers' layout blocks return (`build_packed_sequence`,
        `build_ref2va_packed_sequence`), and verl-omni's `build_ref2va_layout_from_meta` with them:
        position_ids, token_tags, video, audio and text indices, and how many leading video and audio rows are
        conditions.
        """
        positions, tags, video, audio, text, video_conditions, audio_conditions = layout
        return cls(
            position_ids=positions,
            token_tags=tags,
            text_indices=text,
            video_indices=video,
            audio_indices=audio,
            video_generated=torch.arange(len(video), device=video.device) >= video_conditions,
            audio_generated=torch.arange(len(audio), device=audio.device) >= audio_conditions,
        )

    @classmethod
    def from_rollout(cls, fields: Mapping[str, Any], sample: int = 0) -> PackedSequence:
        """Read sample `sample` of verl-omni's FlowGRPO rollout fields (`h3_seq_len`, `h3_position_ids`, ...).

        The fields are batched and padded to a common length; the counts `h3_seq_len`, `h3_video_rows` and
        `h3_audio_rows` say what is real. Optional `h3_audio_update_mask` marks audio references (Ref2VA).
        A Ref2VA rollout sends reference blocks instead: rebuild its layout and use `from_layout`. Raises
        ReplayError naming every missing field.
        """
        needed = {f"h3_{name}" for name in (*_FIELDS, "seq_len", "video_rows", "audio_rows")}
        missing = sorted(needed - set(fields))
        if missing and "ref_block_meta" in fields:
            raise ReplayError(
                "a Ref2VA rollout describes its layout by reference blocks; rebuild it with verl-omni's"
                " build_ref2va_layout_from_meta and pass the result to PackedSequence.from_layout"
            )
        if missing:
            raise ReplayError(f"rollout lacks {', '.join(missing)}; it has {', '.join(sorted(fields))}")
        seq, video, audio = (
            int(fields[f"h3_{name}"][sample].item()) for name in ("seq_len", "video_rows", "audio_rows")
        )
        text = seq - video - audio
        if text < 0:
            raise ReplayError(f"h3_seq_len {seq} is less than h3_video_rows {video} + h3_audio_rows {audio}")
        audio_mask = fields.get("h3_audio_update_mask")
        return cls(
            position_ids=fields["h3_position_ids"][sample][:seq],
            token_tags=fields["h3_token_tags"][sample][:seq].long(),
            text_indices=fields["h3_text_indices"][sample][:text].long(),
            video_indices=fields["h3_video_indices"][sample][:video].long(),
            audio_indices=fields["h3_audio_indices"][sample][:audio].long(),
            video_generated=fields["h3_video_update_mask"][sample][:video].bool(),
            audio_generated=torch.ones(audio, dtype=torch.bool)
            if audio_mask is None
            else audio_mask[sample][:audio].bool(),
        )

    def __len__(self) -> int:
        return int(self.position_ids.shape[0])

    def row_timesteps(self, video_t: float | Tensor, audio_t: float | Tensor) -> tuple[Tensor, Tensor]:
        """The distinct timesteps of the sequence, sorted ([M] fp32), and the index of every row's in them
        ([S] int64).

        `video_t` and `audio_t` are `1 - sigma` of the generated rows. Text rows reach no head and take the
        video's. Pass what the rollout passed to its model: `sigma * 1000 / 1000` is not always `sigma` in
        fp32.
        """
        video_t, audio_t = (
            torch.as_tensor(t, dtype=torch.float32, device="cpu").reshape(()) for t in (video_t, audio_t)
        )
        rows = torch.full((len(self),), float(video_t), dtype=torch.float32)
        condition = self.video_indices[~self.video_generated].cpu()
        rows[condition] = max(float(video_t), VIDEO_CONDITION_TIMESTEP)
        rows[self.audio_indices[self.audio_generated].cpu()] = float(audio_t)
        rows[self.audio_indices[~self.audio_generated].cpu()] = max(float(audio_t), AUDIO_CONDITION_TIMESTEP)
        timesteps, indices = torch.unique(rows, sorted=True, return_inverse=True)
        return timesteps, indices

    def arguments(
        self, video_t: float | Tensor, audio_t: float | Tensor, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Keyword arguments of Diffusers' forward that say how rows lie and when: all but the three streams.

        `video_t` and `audio_t` as for `row_timesteps`.
        """
        timesteps, indices = self.row_timesteps(video_t, audio_t)
        laid = {name: getattr(self, name) for name in _LAYOUT}
        given = {"timestep": timesteps, "timestep_indices": indices, **laid}
        return {name: tensor.to(device) for name, tensor in given.items()}

    def generated_rows(self, stream: str) -> Tensor:
        """Logical index of each `video` or `audio` row among the generated ones, -1 for condition rows; int64
        [N]."""
        generated: Tensor = getattr(self, f"{stream}_generated")
        return torch.where(generated, generated.cumsum(0) - 1, -1)

    def keys(self, sample_id: int | Sequence[int], timesteps: int) -> dict[str, Tensor]:
        """Logical keys `[rows, 3]` int64 of each row set a linear of the model sees: `(sample_id, kind,
        index)`.

        `packed` are the S rows of the block stack, `text`, `video`, `audio` the rows of the three input
        projections and `time` the M distinct timesteps of the AdaLN projections. A key says which row it is,
        not where it lies, so it survives any packing; its order is that of the layout the rollout ran, in
        which attention and weight gradients then reduce. `sample_id` must be non-negative and differ between
        any two forwards whose gradients are accumulated together (one replayed step of one sample is one id).
        Several ids are a batch of samples of this layout: their rows follow one another, and they share the
        timestep rows of the first.
        """
        ids = (sample_id,) if isinstance(sample_id, int) else tuple(sample_id)
        if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
            raise ReplayError(f"sample ids must be distinct and >= 0 (negative keys mean padding), got {ids}")
        each = [self._keys(i, timesteps) for i in ids]
        keys = {name: torch.cat([k[name] for k in each]) for name in each[0]}
        return {**keys, "time": each[0]["time"]}

    def _keys(self, sample_id: int, timesteps: int) -> dict[str, Tensor]:
        device = self.position_ids.device
        order = torch.arange(len(self), device=device) if self.order is None else self.order
        packed = _keys(sample_id, _SEQUENCE, order)
        streams = {name: packed[getattr(self, f"{name}_indices")] for name in ("text", "video", "audio")}
        return {
            "packed": packed,
            **streams,
            "time": _keys(sample_id, _TIME, torch.arange(timesteps, device=device)),
        }

    def permuted(self, place: Tensor) -> PackedSequence:
        """The same request with row i moved to `place[i]` ([S] int64, a permutation); keys stay with their
        rows."""
        back = place.argsort()
        order = torch.arange(len(self), device=place.device) if self.order is None else self.order
        return PackedSequence(
            position_ids=self.position_ids[back],
            token_tags=self.token_tags[back],
            text_indices=place[self.text_indices],
            video_indices=place[self.video_indices],
            audio_indices=place[self.audio_indices],
            video_generated=self.video_generated,
            audio_generated=self.audio_generated,
            order=order[back],
        )


def split_joint(latents: Tensor, video: tuple[int, int], audio: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Split a flattened joint latent `[Nv*Cv + Na*Ca]` into video `[Nv, Cv]` and audio `[Na, Ca]` rows.

    verl-omni carries trajectories in this form (video rows, then audio rows). `video` and `audio` are `(rows,
    channels)`.
    """
    cut = video[0] * video[1]
    if latents.dim() != 1 or latents.shape[0] != cut + audio[0] * audio[1]:
        raise ReplayError(
            f"joint latents of {tuple(latents.shape)} do not hold {video[0]}x{video[1]} video and"
            f" {audio[0]}x{audio[1]} audio values"
        )
    return latents[:cut].view(video), latents[cut:].view(audio)


def flatten_joint(video: Tensor, audio: Tensor) -> Tensor:
    """Inverse of `split_joint`."""
    return torch.cat((video.reshape(-1), audio.reshape(-1)))


def _keys(sample_id: int, kind: int, index: Tensor) -> Tensor:
    return torch.stack((torch.full_like(index, sample_id), torch.full_like(index, kind), index), dim=1)
