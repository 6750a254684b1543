"""vLLM-Omni's own pipeline, in a worker's process, with nothing but environment variables to say what to bind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from h3_adapter_vllm.testing import cpu, release

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    """A function that serves the miniature release in a fresh process: the process, and its reports by file name."""
    folder = tmp_path_factory.mktemp("served")
    model = engine.build(release.CONFIG)
    engine.randomise(model)
    root = release.write_release(folder, engine.release_state(model))
    cpu.announce(folder / "platform")

    def serve(name, **variables):
        reports = folder / name
        environment = {k: v for k, v in os.environ.items() if not k.startswith("H3_")} | {
            "PYTHONPATH": os.pathsep.join([str(folder / "platform"), os.environ.get("PYTHONPATH", "")]),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "HF_HUB_OFFLINE": "1",
            "H3_REPORT": str(reports),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("served.py")), str(root)],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        written = sorted(reports.iterdir()) if reports.exists() else []
        return done, {path.name: json.loads(path.read_text()) for path in written}

    return serve


def digests(done):
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["padding"] for line in lines] == [None, 640]
    return [line["digest"] for line in lines]


def test_a_strict_server_binds_every_node_and_padding_changes_no_bit_of_video_or_audio(served):
    done, reports = served("strict", H3_MODE="strict")
    alone, padded = digests(done)
    assert alone == padded
    assert list(reports) == ["transformer.rank0.json"]
    report = reports["transformer.rank0.json"]
    assert report["title"].startswith("h3 rollout, mode strict, scope model, h3-parallel-v1-u8")
    assert {node["state"] for node in report["nodes"]} == {"bound"}


def test_as_shipped_padding_changes_the_video(served):
    """Negative twin: the same server without ``H3_MODE``; nothing is bound and no report written."""
    done, reports = served("off")
    alone, padded = digests(done)
    assert alone != padded
    assert not reports


def test_a_server_that_cannot_bind_does_not_start(served):
    done, reports = served("refused", H3_MODE="strict", H3_ATTENTION="fast")
    assert done.returncode != 0
    assert "no attention provider is named 'fast'" in done.stderr
    assert not reports
