"""Find the linears of a model and list every reason not to bind them, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from h3_kernels.binding import Style
from h3_kernels.contract import Rejected, legality
from h3_kernels.modes import Scope
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA

from h3_adapter_vllm.bindings import FORWARD, LinearRule, Node
from h3_adapter_vllm.errors import InstallError
from h3_adapter_vllm.method import ContractMethod

# vLLM's compile passes that replace a linear or the all-reduce after it (vllm/config/compilation.py, PassConfig).
BYPASSING_PASSES = ("fuse_allreduce_rms", "fuse_gemm_comms", "enable_sp")


@dataclass(frozen=True, slots=True)
class Site:
    """One linear to bind: its name in the bare model, its rule, the engine's layer, and the LoRA wrapper around it."""

    name: str
    rule: LinearRule
    layer: Any
    wrapper: Any = None

    @property
    def method(self) -> ContractMethod | None:
        """Our quant method if the layer holds one."""
        method = self.layer.quant_method
        return method if isinstance(method, ContractMethod) else None


def module_at(model: nn.Module, name: str) -> Any:
    """The submodule ``name``, LoRA wrapper or not. Raises AttributeError if there is none."""
    return model.get_submodule(name)


def forward_nodes(model: nn.Module) -> Iterator[tuple[str, Node]]:
    """Every node of the model's forward by name, in order. Raises InstallError if the model has no block lists."""
    for blocks, nodes in FORWARD:
        prefixes = [""]
        if blocks is not None:
            try:
                prefixes = [f"{blocks}.{index}." for index in range(len(module_at(model, blocks)))]
            except (AttributeError, TypeError):
                hint = "; pass pipeline.transformer" if hasattr(model, "transformer") else ""
                kind = type(model).__name__
                raise InstallError(
                    [f"{kind} has no module list {blocks!r}: expected a MiniMaxH3DiTModel{hint}"]
                ) from None
        for prefix in prefixes:
            yield from ((prefix + node.suffix, node) for node in nodes)


def find_sites(model: nn.Module, scope: Scope) -> list[Site]:
    """Every linear that ``scope`` binds, in forward order. Raises InstallError naming the modules that are missing."""
    sites, missing = [], []
    for name, node in forward_nodes(model):
        if not isinstance(node, LinearRule) or not node.within(scope):
            continue
        try:
            module = module_at(model, name)
        except AttributeError:
            missing.append(f"{name}: no such module, expected a {node.engine_class}")
            continue
        wrapper = module if isinstance(module, BaseLayerWithLoRA) else None
        layer = module if wrapper is None else wrapper.base_layer
        if isinstance(layer, LinearBase) and type(layer).__name__ == node.engine_class:
            sites.append(Site(name, node, layer, wrapper))
        else:
            missing.append(f"{name}: is a {type(layer).__name__}, expected a {node.engine_class}")
    if missing or not sites:
        raise InstallError(missing or [f"{type(model).__name__} has no blocks"])
    return sites


def obstacles(sites: list[Site], *, contract: str, tp: int) -> list[str]:
    """Every reason not to bind ``sites`` at degree ``tp``, one line each; empty if there is none."""
    reasons = [f"{site.name}: {reason}" for site in sites for reason in _of_site(site, contract, tp)]
    return reasons + list(_of_configuration(tp))


def _of_site(site: Site, contract: str, tp: int) -> Iterator[str]:
    layer, method = site.layer, site.layer.quant_method
    if layer.tp_size != tp:
        yield f"built for tp={layer.tp_size}, but tp={tp} was asked for"
        return
    n, k = layer.output_size, layer.input_size
    verdict = legality(site.rule.contract(contract), n=n, k=k, tp=tp, parts=site.rule.parts)
    if isinstance(verdict, Rejected):
        yield verdict.reason
    if layer.quant_config is not None or type(method) is not UnquantizedLinearMethod:
        kind = type(method).__name__
        yield f"quant method {kind}: the contracts cover unquantised weights, load the bf16 checkpoint"
    else:
        yield from _of_weight(getattr(layer, "weight", None), site.rule.dtype)
        yield from _of_bias(layer.bias, site.rule.dtype)
    if "forward" in vars(layer):
        yield "its forward is patched on the instance, so the quant method may not run; remove that patch first"
    if site.wrapper is not None:
        yield from _of_wrapper(site.wrapper, site.rule.dtype)
    if site.rule.style is Style.ROW and tp > 1 and not layer.reduce_results:
        yield "reduce_results is already False: another collective or fusion owns the sum over tp"


def _of_weight(weight: Any, dtype: str) -> Iterator[str]:
    if not isinstance(weight, Tensor):
        yield "has no weight"
    elif weight.numel() == 0:
        yield "weight is empty: vLLM packed it for the CPU; install before process_weights_after_loading"
    elif weight.is_meta:
        yield "weight is on the meta device: load the weights first"
    elif hasattr(weight, "device_mesh"):
        yield "weight is a DTensor: the contracts read whole local shards, so HSDP must be off"
    elif str(weight.dtype) != f"torch.{dtype}":
        yield f"weight is {weight.dtype}, expected torch.{dtype}"


def _of_bias(bias: Any, dtype: str) -> Iterator[str]:
    if bias is not None and str(bias.dtype) != f"torch.{dtype}":
        yield f"bias is {bias.dtype}, expected torch.{dtype} like the weight"


def _of_wrapper(wrapper: Any, dtype: str) -> Iterator[str]:
    if not isinstance(wrapper, DiffusionBaseLinearLayerWithLoRA):
        yield f"its LoRA wrapper is vLLM's {type(wrapper).__name__}, expected one of vLLM-Omni's"
    elif str(wrapper.lora_config.lora_dtype) != f"torch.{dtype}":
        yield f"its LoRA is {wrapper.lora_config.lora_dtype}, expected torch.{dtype} like the weight"


def _of_configuration(tp: int) -> Iterator[str]:
    config = get_current_vllm_config_or_none()
    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    for name in BYPASSING_PASSES:
        if tp > 1 and getattr(passes, name, None):
            yield f"vLLM pass {name} is on and would replace the contract's collective; set pass_config.{name}=False"
