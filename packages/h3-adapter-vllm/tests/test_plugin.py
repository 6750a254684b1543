"""The served engine: vLLM-Omni's own loader, with nothing but environment variables to say what to bind."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from h3_adapter_vllm import InstallError, handle_of, plugin
from h3_adapter_vllm.testing import engine as tiny
from h3_kernels.errors import ModeError
from safetensors.torch import save_file
from torch import nn

pytestmark = pytest.mark.engine


class Pipeline(nn.Module):
    """A custom pipeline of one transformer, as ``load_format="custom_pipeline"`` takes it."""

    def __init__(self, od_config):
        from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

        super().__init__()
        self.transformer = tiny.build(plain_linears=False)
        source = DiffusersPipelineLoader.ComponentSource(od_config.model, "transformer", None, "transformer.")
        self.weights_sources = [source]

    def load_weights(self, weights):
        pairs = ((name.removeprefix("transformer."), tensor) for name, tensor in weights)
        return {f"transformer.{name}" for name in self.transformer.load_weights(pairs)}


@pytest.fixture(scope="module")
def checkpoint(release, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "transformer").mkdir()
    save_file(release, folder / "transformer" / "model.safetensors")
    return folder


@pytest.fixture
def loader(checkpoint, monkeypatch):
    """vLLM-Omni's loader class, restored afterwards, and a function that loads the pipeline with it."""
    from vllm.config import LoadConfig
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader as Loader

    for name in ("_process_weights_after_loading", "load_model"):
        monkeypatch.setattr(Loader, name, getattr(Loader, name))
    od_config = OmniDiffusionConfig(model=str(checkpoint))

    def load():
        return Loader(LoadConfig(), od_config).load_model("cpu", "custom_pipeline", Pipeline)

    return load


def test_strict_mode_binds_what_the_loader_loads(engine, loader, monkeypatch, tmp_path):
    """Registered twice, loaded through the engine: bound, weights kept on the CPU, report written after a forward."""
    monkeypatch.setenv("H3_MODE", "strict")
    monkeypatch.setenv("H3_SCOPE", "projections")
    monkeypatch.setenv("H3_CONTRACT", "h3-parallel-v1-u4")
    monkeypatch.setenv("H3_REPORT", str(tmp_path / "reports"))
    plugin.register()
    plugin.register()
    model = loader().transformer
    handle = handle_of(model)
    assert handle.settings.contract == "h3-parallel-v1-u4"
    assert not (tmp_path / "reports").exists()
    for _ in range(2):
        engine.velocities(model, [engine.request()])
    assert len(handle.report().bound()) == 26
    (path,) = (tmp_path / "reports").iterdir()
    assert path.name == "transformer.rank0.json"
    states = [node["state"] for node in json.loads(path.read_text())["nodes"]]
    assert states.count("bound") == 26
    assert "refused" not in states


@pytest.mark.parametrize("word", [None, "", "off"])
def test_without_a_mode_the_loader_is_untouched(loader, monkeypatch, word):
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader as Loader

    monkeypatch.delenv("H3_MODE", raising=False)
    if word is not None:
        monkeypatch.setenv("H3_MODE", word)
    before = dict(vars(Loader))
    plugin.register()
    assert dict(vars(Loader)) == before
    assert handle_of(loader().transformer) is None


def test_a_model_that_cannot_be_bound_does_not_load(loader, monkeypatch):
    monkeypatch.setenv("H3_MODE", "strict")
    monkeypatch.setenv("H3_CONTRACT", "h3-parallel-v9")
    plugin.register()
    with pytest.raises(InstallError, match="'h3-parallel-v9' is not a row-parallel contract"):
        loader()


def test_a_wrong_word_stops_the_process(monkeypatch):
    monkeypatch.setenv("H3_MODE", "stricter")
    with pytest.raises(ModeError, match="H3_MODE mode 'stricter'"):
        plugin.register()


def test_entry_point_of_the_package_is_the_plugin():
    """What pyproject.toml declares is what vLLM-Omni would load and call."""
    import tomllib

    from vllm_omni.plugins import OMNI_DEFAULT_PLUGINS_GROUP

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"][OMNI_DEFAULT_PLUGINS_GROUP]["h3"]
    assert EntryPoint("h3", value, OMNI_DEFAULT_PLUGINS_GROUP).load() is plugin.register


def test_importing_the_plugin_imports_no_engine():
    """vLLM-Omni only logs a plugin whose import fails and then serves unbound: the import does next to nothing."""
    code = "import sys, h3_adapter_vllm.plugin; print([m for m in ('vllm', 'vllm_omni', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
