"""Scopes ``linears`` and ``projections``: a contract method in each linear of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from h3_kernels.audit import AuditRow
from h3_kernels.binding import Binding, Style
from torch import nn

from h3_adapter_vllm.lora import SEAM
from h3_adapter_vllm.method import ContractMethod
from h3_adapter_vllm.report import linear_nodes
from h3_adapter_vllm.settings import Settings
from h3_adapter_vllm.survey import Site


class LinearBinding:
    """The linears of one model, bound. :meth:`bind` once, :meth:`restore` once.

    While AdaLN projections are bound, the engine's cache of their outputs is off: it does not see weights written
    through ``param.data``, as vLLM's own loaders and a weight sync write them, and would go on serving the old ones.
    """

    def __init__(self, model: nn.Module, sites: list[Site], settings: Settings) -> None:
        self._model: Any = model
        self._cache_bytes: int | None = None
        self._settings = settings
        self._reduces: dict[str, bool] = {}
        self.sites = {site.name: site for site in sites}

    def bind(self) -> None:
        """Put the methods in place and switch the row-parallel layers' own reductions off."""
        for name, site in self.sites.items():
            site.layer.quant_method = ContractMethod(site.rule, site.layer.quant_method, self._settings)
            if site.rule.style is Style.ROW:
                self._reduces[name] = site.layer.reduce_results
                site.layer.reduce_results = False
        if any(name.endswith("adaln_proj.linear") for name in self.sites):
            self._cache_bytes, self._model.adaln_cache.max_bytes = self._model.adaln_cache.max_bytes, 0
        SEAM.acquire()

    def restore(self) -> list[str]:
        """Undo :meth:`bind`; the names of linears that something else changed since, which are left alone."""
        SEAM.release()
        if self._cache_bytes is not None:
            self._model.adaln_cache.max_bytes = self._cache_bytes
            self._model.adaln_cache.clear()
        return [name for name, site in self.sites.items() if not self._restore(name, site)]

    def lost(self) -> list[str]:
        """Names of linears that no longer hold our method."""
        return [name for name, site in self.sites.items() if not self._holds(site)]

    def nodes(self) -> Iterator[tuple[str, Binding]]:
        """What serves each node of the forward, read back from the last one."""
        return linear_nodes(self._model, self.sites, self._settings)

    def audit(self) -> list[AuditRow]:
        """What audit mode has seen, per linear in forward order."""
        methods = ((name, site.method) for name, site in self.sites.items())
        return [m.auditor.row(name) for name, m in methods if m is not None and m.auditor is not None]

    def _holds(self, site: Site) -> bool:
        return site.method is not None and site.method.settings is self._settings

    def _restore(self, name: str, site: Site) -> bool:
        if site.method is None or not self._holds(site):
            return False
        site.method.detach(site.layer)
        if name in self._reduces:
            site.layer.reduce_results = self._reduces[name]
        return True
