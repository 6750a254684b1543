"""The command line as people meet it: exit codes, --json, messages on one line, progress, signals, no torch."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from h3_mapper import Layout
from h3_mapper.cli import _Bar, main
from mapper_testkit import TINY, read_files, reference_native, snapshot, write_diffusers, write_file

SRC = Path(__file__).parents[1] / "src"


@pytest.fixture
def src(tmp_path):
    write_diffusers(tmp_path / "src", TINY, shards=2)
    return tmp_path / "src"


def call(capsys, *args):
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_convert_then_verify_then_manifest(src, tmp_path, capsys):
    code, out, _ = call(
        capsys, "convert", src, tmp_path / "r", "--to", "release", "--max-shard-size", "100KB"
    )
    assert code == 0
    assert "diffusers -> release, 55 tensors" in out
    code, out, _ = call(capsys, "verify", src, tmp_path / "r")
    assert (code, out.split(":")[0]) == (0, "equal")
    code, out, _ = call(capsys, "manifest", tmp_path / "r")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "r" / "h3-manifest.json").read_text())


def test_verify_exits_1_on_a_difference_and_2_on_bad_input(src, tmp_path, capsys):
    write_diffusers(tmp_path / "other", TINY, seed=1)
    code, out, _ = call(capsys, "verify", src, tmp_path / "other")
    assert code == 1
    assert "66 of 66 atoms differ" in out
    assert "and 46 more" in out
    code, out, err = call(capsys, "verify", src, tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert err == f"h3-mapper: {tmp_path}/nowhere: no such file or folder\n"


def test_every_command_speaks_json(src, tmp_path, capsys):
    write_diffusers(tmp_path / "other", TINY, seed=1)
    calls = {
        ("inspect", src): 0,
        ("plan", "--from", "release", "--to", "module", "--config", src / "config.json"): 0,
        ("convert", src, tmp_path / "m", "--to", "module", "--digest", "blake3", "--threads", "1"): 0,
        ("verify", src, tmp_path / "other"): 1,
        ("manifest", src, "--digest", "blake3"): 0,
        ("demo",): 0,
        ("convert", src, tmp_path / "m", "--to", "module"): 2,
    }
    seen = {}
    for args, expected in calls.items():
        code, out, _ = call(capsys, *args, "--json")
        assert code == expected, out
        seen[args[0], code] = json.loads(out)
    assert seen["inspect", 0]["components"][0]["layout"] == "diffusers"
    assert {len(t["rows"]) for t in seen["plan", 0]["targets"]} == {0, 1, 6}
    assert seen["convert", 0]["components"][0]["tensors"] == 55
    assert len(seen["verify", 1]["differences"]) == 66
    assert seen["convert", 2]["error"] == "OutputExistsError"
    assert all(step["as_promised"] for step in seen["demo", 0]["steps"])


def test_a_statement_can_be_made_for_one_side(src, tmp_path, capsys):
    (tmp_path / "n").mkdir()
    write_file(tmp_path / "n" / "model.safetensors", reference_native(read_files(src), TINY, Layout.RELEASE))
    assert call(capsys, "verify", src, tmp_path / "n")[0] == 2
    assert call(capsys, "verify", src, tmp_path / "n", "--from-b", "release")[0] == 0
    code, out, _ = call(capsys, "verify", src, tmp_path / "n", "--from-b", "module")
    assert code == 1
    assert "agree if it is read as release" in out


def test_inspect_describes_what_is_ambiguous_and_what_is_broken(src, tmp_path, capsys):
    (tmp_path / "n").mkdir()
    held = reference_native(read_files(src), TINY, Layout.RELEASE)
    write_file(tmp_path / "n" / "model.safetensors", held)
    code, out, _ = call(capsys, "inspect", tmp_path / "n")
    assert code == 0
    assert "native (release or module: not stated)" in out
    del held["blocks.0.norm1.weight"]
    write_file(tmp_path / "n" / "model.safetensors", held)
    code, out, _ = call(capsys, "inspect", tmp_path / "n")
    assert code == 2
    assert "MissingTensorError" in out


def _put(folder, name, data):
    folder.mkdir()
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ("h3.gguf", b"GGUF", "h3-mapper reads no GGUF (h3.gguf)"),
        ("pytorch_model.bin", b"PK", "pickled weights are never opened (pytorch_model.bin)"),
        ("snapshots", None, "a hub cache's root: point at a snapshot (snapshots/abc)"),
        ("model.safetensors", None, "model.safetensors: Is a directory"),
    ],
)
def test_what_people_take_for_a_checkpoint_is_named(tmp_path, capsys, name, data, said):
    if data is None:
        (tmp_path / "got" / name / "abc").mkdir(parents=True)
    else:
        _put(tmp_path / "got", name, data)
    code, out, err = call(capsys, "convert", tmp_path / "got", tmp_path / "out", "--to", "release")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "comfy"], "argument --to: 'comfy' is not one of diffusers, release, module"),
        (["--to", "module", "--digest", "md5"], "argument --digest: 'md5' is not one of xxh3, blake3, none"),
        ([], "the following arguments are required: --to"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_right_ones(src, tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(src), str(tmp_path / "out"), *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"h3-mapper convert: {said}; see h3-mapper convert --help\n"


@pytest.mark.parametrize("tp", ["0", "-1"])
def test_a_degree_below_one_is_refused(src, tmp_path, capsys, tp):
    code, _, err = call(capsys, "convert", src, tmp_path / "out", "--to", "module", "--tp", tp)
    assert code == 2
    assert f"tp {tp} is no degree; this model allows" in err
    assert not (tmp_path / "out").exists()


def test_another_models_config_is_named_with_its_folder(src, tmp_path, capsys):
    (src / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = call(capsys, "convert", src, tmp_path / "out", "--to", "release")
    assert code == 2
    assert err.startswith(
        f"h3-mapper: {src}/config.json: model_type is 'llama'; expected a MiniMax-H3 transformer"
    )


def test_plan_without_a_config_is_the_released_models(capsys):
    code, out, _ = call(capsys, "plan", "--from", "diffusers", "--to", "release")
    assert code == 0
    assert "638 tensors become 535, 66,280,430,080 bytes in 9270 row blocks" in out
    assert "168 blocks of 128 rows, in turns" in out


@pytest.mark.parametrize("threads", ["0", "1000"])
def test_a_thread_count_that_makes_no_sense_is_refused(src, tmp_path, capsys, threads):
    code, _, err = call(capsys, "convert", src, tmp_path / "x", "--to", "module", "--threads", threads)
    assert code == 2
    assert "expected 1 to 64" in err
    assert not (tmp_path / "x").exists()


def test_demo_can_leave_its_checkpoints(tmp_path, capsys):
    code, out, _ = call(capsys, "demo", "--keep", tmp_path / "kept")
    assert code == 0
    assert out.count("every bit") == 3
    assert {"release", "module", "swapped"} <= {p.name for p in (tmp_path / "kept").iterdir()}
    assert call(capsys, "verify", tmp_path / "kept" / "diffusers", tmp_path / "kept" / "swapped")[0] == 1
    assert call(capsys, "demo", "--keep", tmp_path / "kept")[0] == 2


def test_the_demo_fails_if_a_step_does(capsys, monkeypatch):
    """Negative twin: with a swap that swaps nothing, `caught` must not be claimed."""
    monkeypatch.setattr("h3_mapper.demo.swap_halves", lambda folder, name: None)
    code, out, _ = call(capsys, "demo")
    assert code == 1
    assert "FAILED: caught" in out
    assert "NOT as promised" in out


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen, pipe = Terminal(), io.StringIO()
    bar = _Bar(screen)
    bar.update(2**29, 2**30)
    bar.update(2**30, 2**30)
    bar.close()
    assert "50% 0.50 of 1.00 GiB" in screen.getvalue()
    assert screen.getvalue().endswith("GiB/s\n")
    plain = _Bar(pipe)
    plain.update(1, 2**30)
    assert pipe.getvalue() == ""
    plain.shown -= 60
    plain.update(2**29, 2**30)
    assert pipe.getvalue().startswith("h3-mapper:  50% 0.50 of 1.00 GiB")
    assert "\r" not in pipe.getvalue()


def python(code, path=SRC, **options):
    """Run code in a fresh interpreter that sees only `path` beside the standard library."""
    command = [sys.executable, "-S", "-c", code]
    env = {"PYTHONPATH": str(path), "PATH": os.environ["PATH"]}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, **options)


def test_the_whole_command_line_runs_with_its_three_dependencies_alone(tmp_path):
    """No numpy and no torch within reach, as after `pip install h3-mapper` into an empty environment."""
    (tmp_path / "site").mkdir()
    for name in ("safetensors", "xxhash", "blake3"):
        (tmp_path / "site" / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)
    (tmp_path / "site" / "h3_mapper").symlink_to(SRC / "h3_mapper")
    done = python("import sys; from h3_mapper.cli import main; sys.exit(main(['demo']))", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "All as promised." in done.stdout
    assert python("import numpy", tmp_path / "site").returncode == 1


def test_importing_the_package_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'safetensors', 'xxhash', 'blake3', 'argparse'}"
    assert python(f"import sys, h3_mapper; print({heavy} & set(sys.modules))").stdout == "set()\n"


SLOWED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
import h3_mapper.stream as stream
from h3_mapper.cli import main
real = stream._write
def slow(*args):
    print("writing", flush=True)
    time.sleep(0.2)
    real(*args)
stream._write = slow
sys.exit(main(["convert", *sys.argv[1:], "--to", "module"]))
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(src, tmp_path, sign):
    """A real process, stopped while it writes (the loop is slowed so that it cannot finish first)."""
    before = snapshot(tmp_path)
    env = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", SLOWED, str(src), str(tmp_path / "out")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert any(p.name.endswith(".partial") for p in tmp_path.iterdir())
        process.send_signal(sign)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"interrupted; nothing was written" in err
    assert snapshot(tmp_path) == before


def test_a_reader_that_closes_early_is_no_error(src):
    code = f"import sys; from h3_mapper.cli import main; sys.exit(main(['manifest', {str(src)!r}]))"
    env = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]}
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
