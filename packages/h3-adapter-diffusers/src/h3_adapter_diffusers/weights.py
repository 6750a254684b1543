"""A Diffusers model's parameters under the names the graph asks for: `module` names, fused or in pieces.

Which parameter holds what is read from h3-mapper's table, not repeated here. Parameters are looked up at
every use, so what FSDP2 gathers and what an optimizer or a weight sync replaces is what runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from h3_kernels.graph import ModuleWeights
from h3_mapper import H3Config, Layout, spans
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.lora import base_of
from h3_adapter_diffusers.method import cast_message

_ATOM = re.compile(r"(?P<linear>.*)\.(?P<kind>weight|bias)(\[(?P<part>\w+)\])?")


class DiffusersTensors(Mapping[str, Tensor]):
    """`module` name -> the tensor a Diffusers model holds for it now; see `ModuleWeights` for names of
    pieces."""

    def __init__(self, model: Any) -> None:
        self._where: dict[str, tuple[nn.Module, str, str]] = {}
        for name, held in spans(H3Config.from_mapping(dict(model.config)), Layout.DIFFUSERS).items():
            linear, _, kind = name.rpartition(".")
            parent, _, attribute = linear.rpartition(".")
            self._where[_key([span.atom for span in held])] = model.get_submodule(parent), attribute, kind
        nodes = native_names(model)
        for name, module in model.named_modules():  # fuse_qkv_projections adds a copy of to_q, to_k and to_v
            if getattr(module, "fused_projections", False):
                self._where[f"{nodes[name + '.to_qkv']}.weight"] = module, "to_qkv", "weight"
        found = ((name, self._held(name)) for name in self._where)
        self._dtypes = {name: None if tensor is None else tensor.dtype for name, tensor in found}

    def _held(self, name: str) -> Tensor | None:
        owner, attribute, kind = self._where[name]
        linear = base_of(owner._modules[attribute])
        parameters: dict[str, Tensor | None] = (
            linear._parameters
        )  # nn.Module's own search takes longer than a launch
        return parameters[kind] if kind in parameters else getattr(linear, kind)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._held(name)
        if tensor is None:
            raise KeyError(name)
        if tensor.dtype != self._dtypes[name]:
            raise BoundModelError(cast_message(name, tensor.dtype, self._dtypes[name]))
        if isinstance(tensor, DTensor):
            raise BoundModelError(
                f"{name}: a sharded DTensor at the call; FSDP2 gathers it only when the module it was applied to is"
                " called: apply fully_shard to blocks and to the model, not to what is inside a block"
            )
        return tensor

    def held(self) -> list[Tensor]:
        """Every parameter as it is now."""
        return [tensor for tensor in map(self._held, self._where) if tensor is not None]

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def weights_view(model: nn.Module) -> ModuleWeights:
    """The graph's view of a Diffusers model."""
    return ModuleWeights(DiffusersTensors(model))


def base_state(model: Any) -> dict[str, Tensor]:
    """The base parameters of a model by their bare Diffusers names, whatever PEFT has wrapped; not copied.

    What a weight sync sends and h3-mapper converts: no `.base_layer`, no `lora_`, no fused copy.
    """
    state = {}
    for name in spans(H3Config.from_mapping(dict(model.config)), Layout.DIFFUSERS):
        linear, _, kind = name.rpartition(".")
        parent, _, attribute = linear.rpartition(".")
        state[name] = getattr(base_of(model.get_submodule(parent)._modules[attribute]), kind).detach()
    return state


def native_names(model: Any) -> dict[str, str]:
    """Diffusers module name -> the graph's node: `blocks.0.attn.qkv_proj` for
    `transformer_blocks.0.attn.to_k`."""
    names = {}
    for name, held in spans(H3Config.from_mapping(dict(model.config)), Layout.DIFFUSERS).items():
        atom = _ATOM.fullmatch(held[0].atom)
        assert atom is not None
        module = name.rpartition(".")[0]
        names[module] = atom["linear"]
        if module.endswith(".to_q"):
            names[f"{module.removesuffix('to_q')}to_qkv"] = atom["linear"]
    return names


def _key(atoms: list[str]) -> str:
    """`blocks.0.mlp.fc1.value_gate.weight` for the atoms [value] and [gate] of one tensor; a plain atom's own
    name."""
    found = [_ATOM.fullmatch(atom) for atom in atoms]
    first = found[0]
    assert first is not None
    parts = [match["part"] for match in found if match is not None and match["part"]]
    middle = f".{'_'.join(parts)}" if parts else ""
    return f"{first['linear']}{middle}.{first['kind']}"
