"""Runs a warp-specialised Gluon kernel on a CPU: each partition a thread, copies and products as late as allowed.

Gluon has no interpreter. Here a kernel's functions see fakes in the place of Gluon's: a copy lands some time after it
was asked for, a product reads its operands only when it is waited for, a store leaves when it is waited for. So a wait
that is missing, or a phase that is wrong, shows as other values or as a deadlock; what goes on inside a partition does
not.
"""

from __future__ import annotations

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DEADLOCK_S = 60.0
LATE_S = 0.002


class Value(torch.Tensor):
    """A tensor in registers."""

    def split(self) -> tuple[Value, Value]:
        return self[..., 0], self[..., 1]


class Memory:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Any:
        return Memory(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.permute(order))

    def load(self, layout: Any) -> Value:
        return self.data.clone().as_subclass(Value)

    def store(self, value: Value) -> None:
        assert value.dtype == self.data.dtype
        self.data.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when ``count`` have arrived and all expected bytes have come."""

    def __init__(self) -> None:
        self.turned = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def change(self, arrivals: int, transfer: int) -> None:
        with self.turned:
            self.left -= arrivals
            self.bytes += transfer
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase ^ 1
                self.turned.notify_all()

    def wait(self, parity: int) -> None:
        with self.turned:
            assert self.turned.wait_for(lambda: self.phase != parity, DEADLOCK_S), "deadlock"


class Descriptor:
    """A tensor the copy engine reads or writes in blocks; zero outside."""

    layout = None

    def __init__(self, tensor: torch.Tensor, *block: int) -> None:
        self.tensor, self.block = tensor, block

    def window(self, at: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        inside = tuple(
            slice(a, min(a + b, n)) for a, b, n in zip(at, self.block, self.tensor.shape, strict=True)
        )
        held = self.tensor[inside]
        return held, tuple(slice(0, n) for n in held.shape)


class Product:
    """An accumulator with products under way, oldest first."""

    def __init__(self, total: Any) -> None:
        self.total, self.pending = total, []

    def wait(self, outstanding: int) -> None:
        while len(self.pending) > outstanding:
            a, b = self.pending.pop(0)
            self.total = self.total + (a.data.float() @ b.data.float())


class Partitions:
    """The fakes of one kernel's module, and its launches. ``late``: products stay under way for so many more waits."""

    def __init__(self, module: types.ModuleType, late: int = 0) -> None:
        self.late = late
        self.program = 0
        self.engine = ThreadPoolExecutor(4)
        self.stores = threading.local()
        self.names = dict(vars(module)) | {
            "gl": self._language(),
            "mbarrier": self._barriers(),
            "tma": self._copies(),
            "sync": lambda: None,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_init": lambda value: value if isinstance(value, Product) else Product(value),
            "warpgroup_mma_wait": self._wait,
        }
        for name, function in vars(module).items():
            if hasattr(function, "fn") and isinstance(function.fn, types.FunctionType):
                self.names[name] = types.FunctionType(function.fn.__code__, self.names, name)

    def launch(self, kernel: str, programs: int, *arguments: Any, **constants: Any) -> None:
        for self.program in range(programs):
            self.names[kernel](*arguments, **constants)

    def _language(self) -> types.SimpleNamespace:
        def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
            if dtype == torch.int64:
                barriers = [Barrier() for _ in range(shape[0])]
                return types.SimpleNamespace(index=barriers.__getitem__)
            return Memory(torch.full(shape, float("nan"), dtype=dtype))

        return types.SimpleNamespace(
            constexpr=int,
            bfloat16=torch.bfloat16,
            float32=torch.float32,
            int64=torch.int64,
            static_range=range,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            exp=torch.exp,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Value),
            program_id=lambda axis: self.program,
            NVMMADistributedLayout=lambda *a: None,
            BlockedLayout=lambda *a: None,
            allocate_shared_memory=allocate,
            warp_specialize=self._specialise,
        )

    def _specialise(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(partitions) - 1 == len(warps) == len(registers)
        with ThreadPoolExecutor(len(partitions)) as pool:
            running = [pool.submit(function, *arguments) for function, arguments in partitions]
        for partition in running:
            partition.result()

    def _barriers(self) -> types.SimpleNamespace:
        def init(bar: Barrier, count: int) -> None:
            bar.count = bar.left = count

        return types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=init,
            expect=lambda bar, count: bar.change(1, count),
            wait=lambda bar, parity: bar.wait(parity),
            arrive=lambda bar, pred=True: bar.change(1, 0) if pred else None,
        )

    def _copies(self) -> types.SimpleNamespace:
        def load(source: Descriptor, at: list[int], bar: Barrier, into: Memory) -> None:
            def arrive() -> None:
                time.sleep(LATE_S)
                held, inside = source.window(at)
                into.data.zero_()
                into.data[inside] = held
                bar.change(0, -into.data.numel() * into.data.element_size())

            assert tuple(into.data.shape) == source.block
            self.engine.submit(arrive)

        def store(target: Descriptor, at: list[int], source: Memory) -> None:
            assert tuple(source.data.shape) == target.block
            self.stores.__dict__.setdefault("asked", []).append((target, at, source))

        def wait(outstanding: int) -> None:
            asked = self.stores.asked
            while len(asked) > outstanding:
                target, at, source = asked.pop(0)
                held, inside = target.window(at)
                held.copy_(source.data[inside])

        return types.SimpleNamespace(
            async_copy_global_to_shared=load, async_copy_shared_to_global=store, store_wait=wait
        )

    def _multiply(self, a: Memory, b: Memory, acc: Product, is_async: bool) -> Product:
        assert is_async
        acc.pending.append((a, b))
        return acc

    def _wait(self, outstanding: int, deps: list[Product]) -> Any:
        (acc,) = deps
        if outstanding == 0:
            acc.wait(0)
            return acc.total
        time.sleep(LATE_S)
        acc.wait(outstanding + self.late)
        return acc
