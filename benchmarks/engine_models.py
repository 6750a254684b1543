"""Both real engines, as shipped and bound to the contracts, on one set of random weights: for step_h200 and gates_h200.

vLLM-Omni's model owns the tensors. Every other model is built on the meta device and takes the same storage: q, k and v
are row blocks of the fused weight; only fc1, whose halves Diffusers holds in the other order, is copied once (16 GiB of
50 blocks). So 62 GiB of weights serve any number of models, also shorter ones of the first blocks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from h3_adapter_diffusers import install as diffusers_install
from h3_adapter_diffusers.packing import PackedSequence
from h3_adapter_diffusers.testing.native import native_inputs
from h3_adapter_diffusers.testing.tiny import Request
from h3_adapter_vllm import install_h3_rollout
from h3_adapter_vllm.testing import engine
from h3_kernels.nodes import inverse_frequencies
from h3_mapper import H3Config, Layout, spans
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
RANK = 64
VIDEO_T, AUDIO_T = 0.6, 0.2
Config = Mapping[str, Any]
Run = Callable[[], tuple[Tensor, Tensor]]

_ATOM = re.compile(r"(?P<linear>.*)\.(?P<kind>weight|bias)(\[(?P<part>\w+)\])?")
_PARTS = {"q": (0, 3), "k": (1, 3), "v": (2, 3), "gate": (0, 2), "value": (1, 2)}


def vllm_model(config: Config, device: str) -> Any:
    """vLLM-Omni's model with random weights, as shipped: its own attention for the device, AdaLN cache on."""
    model = engine.build(config, adaln_cache=True, device=device)
    engine.randomise(model)
    return model


def vllm_twin(first: Any, config: Config, blocks: int) -> Any:
    """Another model of the first ``blocks`` blocks, holding the same parameters and buffers."""
    model = engine.build({**config, "num_layers": blocks}, adaln_cache=True, device="meta")
    held = dict(first.named_modules())
    for name, module in model.named_modules():
        module._parameters = dict(held[name]._parameters)
        module._buffers = dict(held[name]._buffers)
    if not next(first.parameters()).is_cuda:
        engine.run_plain(model)
    return model


def diffusers_tensors(first: Any, config: Config) -> dict[str, Tensor]:
    """The tensors of vLLM-Omni's model under Diffusers' names; shared, but for fc1."""
    held = {name: p.data.as_subclass(Tensor) for name, p in first.named_parameters()}

    def piece(atom: str) -> Tensor:
        match = _ATOM.fullmatch(atom)
        assert match is not None
        whole = held[f"{match['linear']}.{match['kind']}"]
        at, of = _PARTS.get(match["part"], (0, 1))
        return whole.chunk(of)[at]

    table = spans(H3Config.from_mapping(dict(config)), Layout.DIFFUSERS)
    pieces = {name: [piece(span.atom) for span in atoms] for name, atoms in table.items()}
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in pieces.items()}


def diffusers_model(tensors: Mapping[str, Tensor], config: Config, blocks: int) -> Any:
    """Diffusers' model of the first ``blocks`` blocks, frozen, holding ``tensors``."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**{**config, "num_layers": blocks}).eval()
    for name, _ in list(model.named_parameters()):
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, nn.Parameter(tensors[name], requires_grad=False))
    device = next(model.parameters()).device
    theta = config.get("rope_theta", 10000.0)
    model.rope.inv_freq = inverse_frequencies(config["rope_freq_dim"], theta).to(device)
    return model


def add_lora(model: Any, seed: int = 1) -> None:
    """A random bf16 adapter of RANK on the six linears of every block, checkpointing on, ready to train."""
    device = next(model.parameters()).device
    model.train()
    with device:
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS))
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            data = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.data = (data * parameter.shape[1] ** -0.5 / 4).bfloat16()
    model.enable_gradient_checkpointing()


class Engines:
    """All models of one run. ``blocks``: how many each engine has; ``bind`` makes a bound twin."""

    def __init__(self, config: Config, device: str) -> None:
        self.config, self.device, self.blocks = dict(config), device, int(config["num_layers"])
        self.vllm = vllm_model(config, device)
        self.tensors = diffusers_tensors(self.vllm, config)
        self.attention = self.vllm.blocks[0].attn.attention.attn_backend.get_name()

    def rollout(self, *, bound: bool, blocks: int | None = None, **install: Any) -> Any:
        """vLLM-Omni's model, as shipped or bound in scope ``model`` with the arguments ``install``."""
        model = vllm_twin(self.vllm, self.config, blocks or self.blocks)
        if bound:
            install_h3_rollout(model, scope="model", **install)
        return model

    def trainer(self, *, bound: bool, lora: bool = False, blocks: int | None = None, **install: Any) -> Any:
        """Diffusers' model, as shipped or bound in scope ``model`` with the arguments ``install``."""
        model = diffusers_model(self.tensors, self.config, blocks or self.blocks)
        if lora:
            add_lora(model)
        if bound:
            diffusers_install.install_h3_training(model, scope="model", **install)
        return model

    def request(self, rows: int, seed: int = 1) -> Request:
        """Text (20%), then audio (10%), then video rows at random positions."""
        generator = torch.Generator().manual_seed(seed)
        text, audio = max(4, rows // 5), max(4, rows // 10)
        counts = (text, audio, rows - text - audio)
        at = torch.arange(rows).split(counts)
        packed = PackedSequence(
            position_ids=torch.randint(0, 64, (rows, 3), generator=generator).float(),
            token_tags=torch.cat([torch.full((n,), tag) for n, tag in zip(counts, (1, 2, 0), strict=True)]),
            text_indices=at[0],
            audio_indices=at[1],
            video_indices=at[2],
            video_generated=torch.ones(counts[2], dtype=torch.bool),
            audio_generated=torch.ones(audio, dtype=torch.bool),
        )
        widths = self.config["in_channels"] * 4, self.config["audio_in_channels"], self.config["text_dim"]
        sizes = zip((counts[2], audio, text), widths, strict=True)
        streams = [torch.randn(n, width, generator=generator) for n, width in sizes]
        return Request(f"{rows} rows", packed, streams[0], streams[1], streams[2].bfloat16())

    def rollout_inputs(
        self, requests: Iterable[Request], *, padding: int = 0, **times: float
    ) -> dict[str, Any]:
        """Keyword arguments of vLLM-Omni's forward, on the device."""
        times = {"video_t": VIDEO_T, "audio_t": AUDIO_T} | times
        moved: dict[str, Any] = to_device(
            native_inputs(list(requests), padding=padding, **times), self.device
        )
        return moved

    def trainer_inputs(
        self, request: Request, video_t: float = VIDEO_T, audio_t: float = AUDIO_T
    ) -> dict[str, Tensor]:
        """Keyword arguments of Diffusers' forward, on the device."""
        streams = {
            "hidden_states": request.video[None],
            "audio_hidden_states": request.audio[None],
            "encoder_hidden_states": request.text[None],
        }
        moved = {name: rows.to(self.device) for name, rows in streams.items()}
        return moved | request.packed.arguments(video_t, audio_t, self.device)

    def rollout_forward(self, model: Any, request: Request, **how: Any) -> Run:
        """One denoise forward of vLLM-Omni's model."""
        inputs = self.rollout_inputs([request], **how)

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                outputs: tuple[Tensor, Tensor] = model(**inputs)
            return outputs

        return run

    def trainer_forward(self, model: Any, request: Request, **times: float) -> Run:
        """One denoise forward of Diffusers' model."""
        inputs = self.trainer_inputs(request, **times)

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad(), self.sdpa():
                outputs: tuple[Tensor, Tensor] = model(**inputs, return_dict=False)
            return outputs[0].flatten(0, 1), outputs[1].flatten(0, 1)

        return run

    def trainer_step(self, model: Any, request: Request) -> Callable[[], dict[str, Tensor]]:
        """Forward and backward of a sum of squares; the LoRA gradients by name."""
        inputs = self.trainer_inputs(request)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        handle = diffusers_install.handle_of(model)
        keys = {name: k.to(self.device) for name, k in request.packed.keys(0, 2).items()}

        def run() -> dict[str, Tensor]:
            for parameter in trained.values():
                parameter.grad = None
            with self.sdpa(), nullcontext() if handle is None else handle.rows(keys):
                video, audio = model(**inputs, return_dict=False)
                (video.float().square().sum() + audio.float().square().sum()).backward()
            return {name: p.grad for name, p in trained.items()}

        return run

    def sdpa(self) -> AbstractContextManager[Any]:
        """cuDNN attention for Diffusers as shipped: importing vllm switches it off for the process."""
        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if self.device == "cuda" else nullcontext()


def to_device(inputs: dict[str, Any], device: str, moved: dict[int, Tensor] | None = None) -> dict[str, Any]:
    """Nested keyword arguments with their tensors moved; one that is given twice stays one."""
    seen: dict[int, Tensor] = {} if moved is None else moved

    def place(value: Any) -> Any:
        if isinstance(value, dict):
            return to_device(value, device, seen)
        return seen.setdefault(id(value), value.to(device)) if isinstance(value, Tensor) else value

    return {name: place(value) for name, value in inputs.items()}


def differing(a: Iterable[Tensor], b: Iterable[Tensor]) -> int:
    """Values whose bits differ."""
    kinds = {4: torch.int32, 2: torch.int16}
    pairs = ((x.contiguous().flatten(), y.contiguous().flatten()) for x, y in zip(a, b, strict=True))
    return sum(
        int((x.view(kinds[x.element_size()]) != y.view(kinds[y.element_size()])).sum()) for x, y in pairs
    )


def distance(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    """Relative norm of the difference of b to a."""
    x, y = (torch.cat([t.flatten() for t in v]).double() for v in (a, b))
    return float((x - y).norm() / x.norm())
