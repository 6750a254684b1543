"""Training steps of an installed model replayed from CUDA graphs, where launching their kernels takes the host longer
than the device.

    install_h3_training(model)
    capture_steps(model)

and the training loop stays as it is: a forward with gradients is one launch, its backward another. Gradients arrive in
``.grad`` as autograd puts them there, with the bits of launched steps (``h3_kernels.graph.steps``).
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from h3_kernels.graph import StepGraphs
from h3_kernels.modes import Mode
from torch import nn

from h3_adapter_diffusers.errors import InstallError
from h3_adapter_diffusers.graph_binding import GraphBinding
from h3_adapter_diffusers.install import handle_of

GRAPHS = 4
"""Steps kept by default. Each holds its gradients once; what forwards keep for their backwards lies in one pool."""


class CapturedSteps:
    """Captured steps of a model; a context manager, or call `release`."""

    def __init__(self, binding: GraphBinding, graphs: StepGraphs) -> None:
        self._binding = binding
        self._graphs = graphs

    def __len__(self) -> int:
        """Steps captured: one for each kind of rows, adapters and switches that has been run."""
        return len(self._graphs)

    def release(self) -> None:
        """Launch steps again and give the graphs' memory back. A second call does nothing."""
        self._graphs.release()
        if self._binding.steps is self._graphs:
            self._binding.steps = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def capture_steps(model: nn.Module, *, graphs: int = GRAPHS) -> CapturedSteps:
    """Capture every forward with gradients of an installed model, and its backward, until `release`.

    The first step over rows of some shapes takes about three; then it is replayed. Rows may have logical keys; other
    shapes, another order of latent rows under them, other adapters, scales or switches are another capture, `graphs` of
    them are kept. Values of weights and inputs are followed; a weight that moved is captured anew. Forwards without
    gradients, and those a tracer watches, are launched as before.

    Refused at the step (BoundModelError, CaptureError): hooks or wrappers on blocks (FSDP2, offload), a checkpointing
    function of the caller's, a backward session, a backward after another forward or for the second time, a weight
    changed between the two.

    Raises InstallError, with every reason: no install in scope `model` and mode strict, tensor parallelism, an overlay,
    a model that is not on a CUDA device, or steps that are captured already.
    """
    handle = handle_of(model)
    if handle is None:
        raise InstallError(["steps are captured of an installed model; call install_h3_training first"])
    binding, settings = handle._binding, handle.settings
    if not isinstance(binding, GraphBinding) or settings.mode is not Mode.STRICT:
        raise InstallError(
            [
                f"steps are captured in scope model and mode strict, not in {settings.scope} and {settings.mode}"
            ]
        )
    reasons = binding.capture_obstacles()
    if reasons:
        raise InstallError(reasons)
    binding.steps = StepGraphs(graphs)
    return CapturedSteps(binding, binding.steps)
