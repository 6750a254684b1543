"""The packed site of tools/h200_site: what is zeroed in a CUDA file, and what stands in for absent packages."""

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "tools" / "h200_site"


@pytest.fixture(scope="module")
def fatbin():
    spec = importlib.util.spec_from_file_location("fatbin", SITE / "fatbin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(architecture, payload, kind=2):
    """One fatbin entry with a 64-byte header."""
    header = struct.pack("<HHIQ", kind, 1, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + payload


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_wanted_architecture_keeps_its_code(fatbin, tmp_path):
    """Everything else of the file, headers and stray magic numbers included, stays byte for byte."""
    stray = b"\x50\xed\x55\xba" + b"not a header"
    parts = [
        b"ELF",
        container(entry(80, b"a" * 40), entry(90, b"b" * 24)),
        stray,
        container(entry(100, b"c" * 8, 1)),
    ]
    source, target = tmp_path / "in.so", tmp_path / "out.so"
    source.write_bytes(b"".join(parts))
    assert fatbin.keep_only(source, target, 90) == (24, 48)
    expected = b"".join(parts).replace(b"a" * 40, bytes(40)).replace(b"c" * 8, bytes(8))
    assert target.read_bytes() == expected


def test_a_file_without_the_architecture_is_refused(fatbin, tmp_path):
    (tmp_path / "in.so").write_bytes(container(entry(80, b"a" * 40)))
    with pytest.raises(ValueError, match="holds no code for sm_90"):
        fatbin.keep_only(tmp_path / "in.so", tmp_path / "out.so", 90)
    assert not (tmp_path / "out.so").exists()


def test_start_up_stands_in_for_absent_packages_and_says_so_when_called():
    code = """
import av, vllm.vllm_flash_attn as flash
print(av.VideoFrame, flash.FA3_AVAILABLE, flash.is_fa_version_supported(3))
try:
    flash.flash_attn_varlen_func()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SITE)!r}); import sitecustomize\n"
         f"sys.modules['vllm'] = type(sys)('vllm'); sys.modules['vllm'].vllm_flash_attn = "
         f"sys.modules['vllm.vllm_flash_attn']{code}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "False False" in done.stdout
    assert "vllm.vllm_flash_attn.flash_attn_varlen_func is not in this site" in done.stdout


def test_every_package_of_the_site_is_pinned():
    lines = [line for line in (SITE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert all(line.count("==") == 1 for line in lines)
