"""Checkpoints that adapters are merged into: the same random weights in any layout, on disk and as torch tensors."""

import json

import safetensors.torch
import torch
from h3_mapper.plan import plan, tensors
from h3_mapper.spec import Layout
from mapper_testkit import TINY


def torch_tensor(value):
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    return torch.frombuffer(bytearray(value.data), dtype=kinds[value.dtype]).reshape(value.shape)


def base_state(layout, seed=3, config=TINY):
    """The same random weights in any layout, as torch tensors."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    source = {
        spec.name: torch.randn(spec.shape, generator=generator).to(kinds[spec.dtype])
        for spec in tensors(config, Layout.DIFFUSERS)
    }
    made = {}
    for target in plan(config, Layout.DIFFUSERS, layout).targets:
        if target.data is not None:
            made[target.name] = torch.frombuffer(bytearray(target.data), dtype=torch.float32)
        else:
            made[target.name] = torch.cat([source[b.name][b.start : b.stop] for b in target.rows])
    return made


def save_base(folder, layout, state=None, config=TINY):
    folder.mkdir()
    stated = {} if layout is Layout.DIFFUSERS else {"h3.layout": str(layout)}
    name = "model.safetensors" if layout.native else "diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file(
        state or base_state(layout, config=config), folder / name, {"format": "pt", **stated}
    )
    (folder / "config.json").write_text(json.dumps(config.to_json(native=layout.native)))
    return folder
