"""Converting and merging adapters, beside Diffusers' and PEFT's own code on the same files.

    python benchmarks/lora.py --out benchmarks/results/lora_cpu.json

One process, imports not counted: a time is from an open path to a closed file. Each round runs ours and the peer in
alternating order; `ratio` is the median of ours / theirs. Ours fsyncs, reads back and (merging) writes digests; the
peers do not. `wrong` counts merged values that differ from the exact sum rounded once, in the last place that differs.

Subjects: a kohya file (fused q/k/v, alpha tensors) to Diffusers' form; an adapter merged into a bf16 checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from h3_mapper import H3Config, Layout, tensors
from h3_mapper.digest import Digest
from h3_mapper.lora import Statement, read, write
from h3_mapper.lora.files import open_adapter, save_adapter
from h3_mapper.lora.floats import narrow
from h3_mapper.lora.formats import Naming
from h3_mapper.lora.merge import find_base, merge
from h3_mapper.lora.modules import places
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside the libraries, raised while they are imported
    import peft
    from diffusers import MiniMaxH3Transformer3DModel
    from diffusers.loaders.lora_pipeline import MiniMaxH3LoraLoaderMixin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from records import write as write_records  # noqa: E402

CONFIG = H3Config(
    num_attention_heads=14,
    hidden_size=1344,
    ffn_dim=3584,
    num_layers=4,
    num_refiner_layers=1,
    text_dim=1280,
    time_embed_hidden_dim=1344,
    time_embed_dim=672,
)
"""A quarter of the released widths, 380 MB: the peers hold the model in memory."""

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
KINDS = {"BF16": torch.bfloat16, "F32": torch.float32}


def adapter_files(folder: Path, rank: int) -> None:
    """The same adapter as a kohya file and as a PEFT folder; alpha = rank / 2."""
    rng = np.random.default_rng(0)
    factors = {}
    for name, place in places(CONFIG, Naming.DIFFUSERS).items():
        if name.endswith(tuple(f".{target}.weight" for target in TARGETS)):
            module, (rows, columns) = name.removesuffix(".weight"), place.shape
            a = rng.standard_normal((rank, columns), np.float32) * columns**-0.5
            factors[f"{module}.lora_A.weight"] = narrow(a, "BF16")
            factors[f"{module}.lora_B.weight"] = narrow(
                rng.standard_normal((rows, rank), np.float32) * 0.1, "BF16"
            )
    adapter = read(factors, CONFIG, statement=Statement(alpha=rank / 2))
    save_adapter(write(adapter, "kohya", CONFIG), folder / "kohya.safetensors", folder / "none")
    save_adapter(write(adapter, "peft", CONFIG), folder / "peft", folder / "none")


def base_folder(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {
        s.name: (torch.randn(s.shape, generator=generator) * 0.02).to(KINDS[s.dtype])
        for s in tensors(CONFIG, Layout.DIFFUSERS)
    }
    (folder / "base").mkdir()
    save_file(state, folder / "base" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (folder / "base" / "config.json").write_text(json.dumps(CONFIG.to_json(native=False)))


def our_convert(folder: Path, out: Path) -> None:
    adapter = open_adapter(folder / "kohya.safetensors").read(CONFIG)
    save_adapter(write(adapter, "diffusers", CONFIG), out / "lora.safetensors", folder / "kohya.safetensors")


def diffusers_convert(folder: Path, out: Path) -> None:
    state = MiniMaxH3LoraLoaderMixin.lora_state_dict(str(folder), weight_name="kohya.safetensors")
    save_file(state, out / "lora.safetensors", {"format": "pt"})


def our_merge(folder: Path, out: Path, digest: Digest = Digest.XXH3) -> None:
    base = find_base(folder / "base")
    merge(base, open_adapter(folder / "peft").read(base.config), out / "merged", digest=digest)


def peft_merge(folder: Path, out: Path) -> None:
    model = MiniMaxH3Transformer3DModel.from_pretrained(folder / "base", torch_dtype=torch.bfloat16)
    merged = peft.PeftModel.from_pretrained(model, folder / "peft").merge_and_unload()
    merged.save_pretrained(out / "merged")


def compared(
    subject: str,
    ours: Callable[[Path], None],
    peer: str,
    theirs: Callable[[Path], None],
    rounds: int,
    folder: Path,
) -> dict[str, Any]:
    pairs = []
    for n in range(rounds + 1):
        seconds = {}
        for name, call in sorted({"ours": ours, "theirs": theirs}.items(), reverse=bool(n % 2)):
            out = folder / f"out-{name}"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            began = time.perf_counter()
            call(out)
            seconds[name] = time.perf_counter() - began
        pairs.append((seconds["ours"], seconds["theirs"]))
    counted = pairs[1:]
    return {
        "subject": subject,
        "peer": peer,
        "ours": statistics.median(a for a, _ in counted),
        "theirs": statistics.median(b for _, b in counted),
        "ratio": statistics.median(a / b for a, b in counted),
        "ratios": [round(a / b, 4) for a, b in counted],
        "unit": "s",
        "rounds": rounds,
    }


def wrong_values(folder: Path, out: Path) -> float:
    """Share of merged values that are not the exact sum rounded once to bf16."""
    base = load_file(folder / "base" / "diffusion_pytorch_model.safetensors")
    merged = load_file(next((out / "merged").glob("*.safetensors")))
    stored = load_file(folder / "peft" / "adapter_model.safetensors")
    settings = json.loads((folder / "peft" / "adapter_config.json").read_text())
    wrong = total = 0
    for name in (key for key in stored if ".lora_A." in key):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = stored[name.replace("lora_A", "lora_B")].double() @ stored[name].double()
        exact = base[f"{module}.weight"].double() + delta * settings["lora_alpha"] / settings["r"]
        wrong += int((merged[f"{module}.weight"] != exact.to(torch.bfloat16)).sum())
        total += exact.numel()
    return wrong / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="h3-lora-bench-") as name:
        folder = Path(name)
        adapter_files(folder, args.rank)
        base_folder(folder)
        found = [
            compared(
                "convert kohya -> diffusers",
                lambda out: our_convert(folder, out),
                "Diffusers lora_state_dict + save_file",
                lambda out: diffusers_convert(folder, out),
                args.rounds,
                folder,
            )
            | {"bytes": (folder / "kohya.safetensors").stat().st_size},
            compared(
                "merge into a bf16 checkpoint",
                lambda out: our_merge(folder, out),
                "PEFT merge_and_unload on Diffusers' model",
                lambda out: peft_merge(folder, out),
                args.rounds,
                folder,
            )
            | {"bytes": (folder / "base" / "diffusion_pytorch_model.safetensors").stat().st_size},
        ]
        found[1] |= {
            "wrong": wrong_values(folder, folder / "out-ours"),
            "theirs_wrong": wrong_values(folder, folder / "out-theirs"),
        }
    for record in found:
        print(json.dumps(record), flush=True)
    write_records(args.out, found)


if __name__ == "__main__":
    main()
