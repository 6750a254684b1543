"""A GPU session runs on the device it is named for and refuses every other, naming each difference."""

import subprocess
import sys
from pathlib import Path

import gpu_matrix
import pytest
from hardware import HARDWARE, Device, WrongHardware, by_key, mismatches, require

ROOT = Path(__file__).parent.parent
H200 = Device("NVIDIA H200", (9, 0), 1, "2.11.0+cu130", "3.6.0", "13.0")


def test_the_right_device_has_no_mismatch() -> None:
    assert mismatches(by_key("h200"), H200) == []


@pytest.mark.parametrize("key", [row.key for row in HARDWARE if row.key != "h200"])
def test_another_session_refuses_the_device(key: str) -> None:
    assert "device is 'NVIDIA H200'" in mismatches(by_key(key), H200)[0]


def test_every_difference_is_named_at_once() -> None:
    old = Device("NVIDIA A100-SXM4-80GB", (8, 0), 1, "2.9.1+cu128", "3.5.1", "12.4")
    wrong = mismatches(by_key("h200"), old, gpus=8)
    assert len(wrong) == 6
    assert "torch is 2.9.1+cu128, expected 2.11 or newer" in wrong
    assert "1 device(s) visible, expected 8" in wrong


def test_a_machine_without_a_device_is_refused_before_anything_runs() -> None:
    with pytest.raises(WrongHardware, match="no CUDA device"):
        require("h200")
    done = subprocess.run(
        [sys.executable, "tools/gpu_matrix.py", "h200"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert done.stdout == ""


def test_a_benchmark_for_several_devices_is_not_run_on_one(tmp_path: Path) -> None:
    """Its record says why; on enough devices it is told how many there are."""
    benchmark = gpu_matrix.BENCHMARKS["parallel"]
    out = tmp_path / "parallel_h200.json"
    assert gpu_matrix.run_benchmark(benchmark, [], {"parallel": out}, 1, 1.0) == (
        [{"benchmark": "parallel", "not_run": "needs 2 GPUs, --gpus is 1"}],
        True,
    )
    assert not out.exists()
    assert benchmark.missing(2) == benchmark.missing(8) == []


def test_a_benchmark_that_fails_is_not_taken_for_one_that_ended_well(tmp_path: Path) -> None:
    """The parallel benchmark refuses a machine without the devices it was promised, and leaves no result file."""
    out = tmp_path / "parallel_h200.json"
    benchmark = gpu_matrix.BENCHMARKS["parallel"]
    found, well = gpu_matrix.run_benchmark(benchmark, [], {"parallel": out}, 8, 120.0)
    assert (found, well) == ([{"benchmark": "parallel", "not_run": "failed with status 2"}], False)
    assert not out.exists()


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(WrongHardware, match="known: h100, h200, b200, a100"):
        by_key("h300")


def test_the_table_agrees_with_the_contracts() -> None:
    """The table is read before anything is installed, so it spells the contract ids out; here they are compared."""
    from h3_kernels import contract

    for row in HARDWARE:
        assert row.contracts[0] == contract.PROJECTION
        assert contract.parallel_id(8).startswith(row.contracts[1])
