"""The import rule: mapper and kernels import neither each other nor an adapter; adapters import both; only h3-kernels
touches torch.cuda; nothing heavy is imported by importing a package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "h3_mapper": ("h3-mapper", set()),
    "h3_kernels": ("h3-kernels", set()),
    "h3_adapter_vllm": ("h3-adapter-vllm", {"h3_mapper", "h3_kernels"}),
    "h3_adapter_diffusers": ("h3-adapter-diffusers", {"h3_mapper", "h3_kernels"}),
}
HEAVY = {"torch", "numpy", "triton", "vllm", "vllm_omni", "diffusers", "transformers", "peft"}
CHECK = "import sys, {module}; print(*sorted({heavy!r} & {{name.split('.')[0] for name in sys.modules}}))"


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / "packages" / folder / "src").rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names a module imports, at any depth of its functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def touches_cuda(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("module", PACKAGES)
def test_a_package_imports_only_what_the_rule_allows(module: str) -> None:
    folder, allowed = PACKAGES[module]
    wrong = {
        f"{path.name}: {name}"
        for path in sources(folder)
        for name in imported(ast.parse(path.read_text())) & (PACKAGES.keys() - allowed - {module})
    }
    assert not wrong


@pytest.mark.parametrize("module", [module for module in PACKAGES if module != "h3_kernels"])
def test_only_h3_kernels_touches_torch_cuda(module: str) -> None:
    wrong = [path.name for path in sources(PACKAGES[module][0]) if touches_cuda(ast.parse(path.read_text()))]
    assert not wrong


def test_the_rule_catches_a_planted_import() -> None:
    """Negative twin: both detectors see what they are for."""
    tree = ast.parse(
        "def f():\n    from h3_kernels.contract import UNITS\n    return torch.cuda.is_available()"
    )
    assert "h3_kernels" in imported(tree)
    assert touches_cuda(tree)


@pytest.mark.parametrize("module", ["h3_mapper", "h3_mapper.cli", "h3_kernels", "h3_kernels.contract"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    code = CHECK.format(module=module, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
