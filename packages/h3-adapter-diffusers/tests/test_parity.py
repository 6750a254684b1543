"""Trainer and rollout on the same weights: the cases of tools/parity.py, and that they can fail."""

import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]


def load(name, folder="tools"):
    spec = spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load("parity_rollout")
parity = load("parity")


@pytest.fixture(scope="module")
def pool():
    from h3_adapter_vllm.testing.pool import TensorParallelPool

    with TensorParallelPool() as workers:
        yield workers


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("weights") / "weights.pt")
    parity.write_weights(path)
    return path


@pytest.mark.parametrize("case", parity.CASES, ids=str)
def test_both_engines_give_the_same_bytes(case, pool, weights):
    """At every tp, with padding, packing and LoRA; as shipped they differ wherever anything is parallel or
    padded."""
    result = parity.run(pool, case, weights)
    assert result.bound == 0, result
    if case.tp > 1 or case.padding or case.lora:
        assert result.shipped is None or result.shipped > 0


def test_a_weight_off_by_one_ulp_is_seen(pool, weights, tmp_path):
    """Negative twin: one norm weight of the rollout, one bf16 step away."""
    state, adapters = torch.load(weights, weights_only=True)
    state["blocks.1.norm2.weight"].view(torch.int16)[3] += 1
    wrong = str(tmp_path / "wrong.pt")
    torch.save((state, adapters), wrong)
    assert parity.run(pool, parity.Case("fl2va"), wrong).bound > 0


def test_the_command_fails_when_a_bound_case_differs(monkeypatch, capsys, tmp_path):
    """Exit status 1, and the table says which case."""

    class Wrong:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, function, path, requests, padding, lora, scope, *, tp):
            video, audio = parity.trainer(parity.Case(requests, tp, padding, lora), bound=scope is not None)
            video[0, 0] = torch.nextafter(video[0, 0], torch.tensor(9.0))
            return [[video.numpy(), audio.numpy()]] * tp

    import h3_adapter_vllm.testing.pool as module

    monkeypatch.setattr(module, "TensorParallelPool", Wrong)
    monkeypatch.setattr(sys, "argv", ["parity", "--only", "t2va", "--json", str(tmp_path / "r.json")])
    assert parity.main() == 1
    assert "t2va      tp=1 padding=0" in capsys.readouterr().out
    assert '"bound": 1' in (tmp_path / "r.json").read_text()


@pytest.fixture(scope="module")
def example():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM says while it is imported
        return load("train_lora_with_rollouts", "examples")


def differences(example, capfd, adapters, full):
    with example.engine.engine():
        example.train(adapters, full)
    return [
        float(line.rpartition(": ")[2]) for line in capfd.readouterr().out.splitlines() if "log-prob" in line
    ]


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_rl_example_has_no_difference_with_the_adapters_and_has_without(example, capfd, monkeypatch, full):
    """Rollout and trainer train together: the log-probabilities agree to the last bit in every step."""
    monkeypatch.setattr(example, "STEPS", 2)
    assert differences(example, capfd, adapters=True, full=full) == [0.0, 0.0]
    assert all(difference > 0 for difference in differences(example, capfd, adapters=False, full=full))
