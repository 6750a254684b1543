"""Pack both real engines for a GPU machine that has torch and Triton but no network.

    python tools/h200_site/build.py [--out tools/h200_site/site]

Writes site.tar.xz (about 46 MB) for Python 3.12 on x86-64 Linux and Hopper (sm_90) alone. On the GPU machine:

    mkdir -p /tmp/site && tar xJf site.tar.xz -C /tmp/site
    export PYTHONPATH=/tmp/site:packages/h3-mapper/src:packages/h3-kernels/src:packages/h3-adapter-vllm/src

In it: vLLM 0.30.0 (its Python files and its stable-ABI extension), vLLM-Omni 0.30.0, fa3-fwd 0.0.3 (vLLM-Omni's own
attention on Hopper), Diffusers 0.42.1 and what they import. Both extensions use torch's stable C ABI only, so builds
for torch 2.13 load in torch 2.11. Left out: vLLM's language-model kernels, which MiniMax-H3 never calls.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

from fatbin import keep_only

HERE = Path(__file__).resolve().parent
SM = 90
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{glibc}_x86_64" for glibc in range(39, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
WHEELS = ("vllm==0.30.0", "fa3-fwd==0.0.3")
VLLM_KEPT = ("vllm/*.py", "vllm/*.json", "vllm/py.typed", "vllm-0.30.0.dist-info/*")
VLLM_DROPPED = (
    "vllm/kernels/helion/configs/*",
    "vllm/model_executor/layers/fused_moe/configs/*",
    "vllm/model_executor/layers/quantization/utils/configs/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/third_party/deep_gemm/*",
    "vllm/vllm_flash_attn/*",
)
VLLM_EXTENSION = "vllm/_C_stable_libtorch.abi3.so"
FA3_EXTENSION = "fa3_fwd/_C.abi3.so"


def pip(*arguments: str) -> None:
    """Run this interpreter's pip for the site's Python and platform; wheels only, no dependencies."""
    target = [flag for platform in PLATFORMS for flag in ("--platform", platform)]
    fixed = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}", *target]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments, *fixed], check=True
    )


def extract(wheel: Path, into: Path, kept: tuple[str, ...], dropped: tuple[str, ...] = ()) -> None:
    """Unpack the members of a wheel that match `kept` and not `dropped`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            wanted = any(fnmatchcase(name, pattern) for pattern in kept)
            if wanted and not any(fnmatchcase(name, pattern) for pattern in dropped):
                archive.extract(name, into)


def slim(wheel: Path, member: str, work: Path, site: Path) -> None:
    """Put a wheel's CUDA extension into the site with the code of one architecture."""
    extract(wheel, work, (member,))
    (site / member).parent.mkdir(parents=True, exist_ok=True)
    kept, zeroed = keep_only(work / member, site / member, SM)
    print(f"{member}: {kept / 1e6:.0f} MB of sm_{SM} code kept, {zeroed / 1e6:.0f} MB of others zeroed")


def build(out: Path) -> Path:
    """Build the site below `out` and return the archive."""
    site, work = out / "tree", out / "work"
    for folder in (site, work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    pip("install", "--no-compile", "--target", str(site), "-r", str(HERE / "requirements.txt"))
    pip("download", "-d", str(work), *WHEELS)
    vllm, fa3 = (next(work.glob(f"{name}-*.whl")) for name in ("vllm", "fa3_fwd"))
    extract(vllm, site, VLLM_KEPT, VLLM_DROPPED)
    extract(fa3, site, ("fa3_fwd_*.py", "fa3_fwd-*"))
    slim(vllm, VLLM_EXTENSION, work, site)
    slim(fa3, FA3_EXTENSION, work, site)
    for unused in ("tvm_ffi/include", "tvm_ffi/src", "tvm_ffi/licenses", "bin"):
        shutil.rmtree(site / unused, ignore_errors=True)
    shutil.copy(HERE / "sitecustomize.py", site)
    archive = out / "site.tar.xz"
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        packed.add(site, ".", filter=lambda item: None if "__pycache__" in item.name else item)
    for folder in (site, work):
        shutil.rmtree(folder)
    return archive


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "site", help="folder to build in (ignored by git)")
    archive = build(parser.parse_args().out.resolve())
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
