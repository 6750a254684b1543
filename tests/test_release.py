"""What a release refuses: a pin between our packages that nobody could meet, a requirement that is not exact."""

import subprocess
import sys
from pathlib import Path

import pin
import pytest
import release

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("requirement", ["h3-mapper>=0.1,<0.2", "h3-mapper<0.2,>=0.1"])
def test_bounds_that_hold_todays_version_pass(requirement: str) -> None:
    release.check_bounds("h3-adapter-vllm", requirement)


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("h3-mapper", "must have a lower and an upper bound"),
        ("h3-mapper>=0.1", "must have a lower and an upper bound"),
        ("h3-mapper>=0.0.9,<0.2", "needs h3-mapper from 0.0.9, which is no version of it"),
        ("h3-mapper>=0.1,<0.1.0", "leaves out h3-mapper 0.1.0"),
    ],
)
def test_a_pin_that_nobody_can_meet_is_refused(requirement: str, message: str) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check_bounds("h3-adapter-vllm", requirement)


def test_every_pin_of_a_requirements_file_has_its_hashes() -> None:
    text = pin.hashed(["torch==2.13.0", "A.b[x]==1"], {"torch==2.13.0": {"cc", "bb"}, "a-b==1": {"aa"}})
    assert text.splitlines() == [
        "A.b[x]==1 \\",
        "    --hash=sha256:aa",
        "torch==2.13.0 \\",
        "    --hash=sha256:bb \\",
        "    --hash=sha256:cc",
    ]


def test_a_pin_without_a_wheel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b==1: no wheel was found"):
        pin.hashed(["b==1"], {})


@pytest.mark.parametrize("line", ["torch>=2.11", "torch", "torch==2.*"])
def test_a_loose_pin_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.in").write_text(f"# tools\nuv==0.13.9  # pinned\n\n{line}\n")
    with pytest.raises(ValueError, match="expected NAME==VERSION"):
        pin.read_pins(tmp_path / "a.in")


TOOLS = sorted(p.name for p in (ROOT / "tools").glob("*.py") if "argparse.ArgumentParser(" in p.read_text())


@pytest.mark.engine  # parity.py imports both
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_how_it_is_run(tool: str) -> None:
    command = [sys.executable, "-W", "ignore", f"tools/{tool}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
