"""Every check of the repository as a session: ``nox -l`` lists them, ``nox -s NAME`` runs one.

CPU sessions make their own environments from the locked and hashed requirements (tools/workspace.py). GPU sessions use
the environment they are started from (``--no-venv``): a GPU node brings its own torch, and may have no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from hardware import HARDWARE  # noqa: E402  (tools/ is not a package: it must run before anything is installed)

PACKAGES = ("h3-mapper", "h3-kernels", "h3-adapter-vllm", "h3-adapter-diffusers")
PYTHONS = ("3.11", "3.12", "3.13")
SOURCES = ("packages", "benchmarks", "tools", "tests", "examples", "noxfile.py")
# Test files of what a package promises on every version it allows: h3-mapper's import no torch, neither any engine.
MAPPER_ALONE = ("cli", "config", "fuzz", "plan", "refusals", "source", "verify")
KERNELS_ALONE = ("contract", "gradients", "graph", "linears", "nodes_values", "ops", "process_state", "trace")
CPU_TESTS = "not gpu and not engine"

nox.options.sessions = ["lint", "typecheck", "tests", "build"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def prepare(session: nox.Session, *steps: str) -> None:
    """Fill the session's environment with the locked workspace, and with the engines where they are asked for."""
    python = Path(session.virtualenv.location) / "bin" / "python"
    boot = ROOT / ".boot" / "bin" / "uv"
    if not boot.exists():
        session.error("no .boot environment: run `make setup` once")
    session.run(
        str(python), "tools/workspace.py", "--venv", session.virtualenv.location, *steps, silent=False
    )


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    prepare(session, "sync")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)


@nox.session(python="3.11")
def typecheck(session: nox.Session) -> None:
    """Strict mypy over every package, against the real torch."""
    prepare(session, "sync", "engines")
    session.run("mypy", *(f"packages/{package}/src" for package in PACKAGES))


@nox.session(python=list(PYTHONS))
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's CPU tests on one Python, the real engines' apart (session `oracles`)."""
    prepare(session, "sync", "engines")
    session.run(
        "pytest", "-q", "-m", CPU_TESTS, f"packages/{package}", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )


@nox.session(python="3.11")
def oracles(session: nox.Session) -> None:
    """Tests that build the real engines: vLLM-Omni and Diffusers, on CPU."""
    prepare(session, "sync", "engines")
    # One run a package: engines and torch.distributed keep one global group a process, and packages must not share it.
    for package in PACKAGES:
        options = ("-q", "-m", "engine and not gpu", f"packages/{package}", *session.posargs)
        session.run("pytest", *options, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.11")
def fuzz(session: nox.Session) -> None:
    """h3-mapper's Hypothesis tests, the checkpoint fuzzers among them, with fifty times the examples of a test run.

    A number of examples, not a time: about 15 minutes on one core.
    """
    prepare(session, "sync", "engines")
    fuzzers = ("pytest", "-q", "--timeout", "3600", "-m", f"hypothesis and {CPU_TESTS}", "packages/h3-mapper")
    session.run(*fuzzers, *session.posargs, env={"HYPOTHESIS_PROFILE": "fuzz", "OMP_NUM_THREADS": "1"})


@nox.session(python="3.11")
def build(session: nox.Session) -> None:
    """Build every wheel and sdist, then install each wheel alone in an empty environment and import it."""
    prepare(session, "sync")
    session.run("python", "tools/release.py", "build", *session.posargs)


def resolve(session: nox.Session, package: str, resolution: str) -> None:
    """Install a package with the lowest or the newest dependencies its metadata allows, and what its tests need."""
    python = f"{session.virtualenv.location}/bin/python"
    install = (str(ROOT / ".boot" / "bin" / "uv"), "pip", "install", "-q", "--no-config", "--python", python)
    fresh = (
        "--resolution",
        resolution,
        "--reinstall-package",
        package,
    )  # uv keeps a folder's build by its version
    session.run(*install, *fresh, f"./packages/{package}", external=True)
    session.run(*install, "pytest", "pytest-timeout", "hypothesis", "numpy", external=True)


@nox.session(python=list(PYTHONS))
@nox.parametrize("resolution", ["lowest-direct", "highest"])
def versions(session: nox.Session, resolution: str) -> None:
    """h3-mapper without torch, on the lowest and the newest dependencies its metadata allows."""
    resolve(session, "h3-mapper", resolution)
    session.run("h3-mapper", "demo")
    session.run("pytest", "-q", *(f"packages/h3-mapper/tests/test_{name}.py" for name in MAPPER_ALONE))


@nox.session(name="versions-torch")
@nox.parametrize(
    ("python", "resolution"), [("3.11", "lowest-direct"), ("3.13", "highest")], ids=["lowest", "newest"]
)
def versions_torch(session: nox.Session, resolution: str) -> None:
    """h3-kernels on the oldest torch it allows and on the newest one, as the package index has them (3 GB each)."""
    resolve(session, "h3-kernels", resolution)
    files = (f"packages/h3-kernels/tests/test_{name}.py" for name in KERNELS_ALONE)
    # A torch that is newer than the pinned one deprecates what the tests call; that is no fault of ours yet.
    options = ("-q", "-W", "default", "-m", CPU_TESTS)
    session.run("pytest", *options, *files, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Generated pages are current; the site builds without a warning."""
    prepare(session, "sync")
    session.run("python", "tools/render.py", "--check")
    session.run("mkdocs", "build", "--strict")  # --quiet would hide the warnings from --strict


@nox.session(name="release-check", python="3.11")
def release_check(session: nox.Session) -> None:
    """Wheels, metadata, licences, changelogs and pins, as a release would publish them."""
    prepare(session, "sync")
    session.run("python", "tools/release.py", "check", *session.posargs)


def _gpu_session(key: str) -> None:
    @nox.session(name=f"gpu-{key}", python=False)
    def gpu(session: nox.Session) -> None:
        session.run("python3", "tools/gpu_matrix.py", key, *session.posargs, external=True)

    gpu.__doc__ = (
        f"GPU tests and benchmarks on {key.upper()}, with the environment's own torch; writes evidence."
    )


for _hardware in HARDWARE:
    _gpu_session(_hardware.key)
