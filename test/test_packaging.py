"""What is built installs where nothing but torch and torchao is, works there, and costs nothing to import."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import torchao

import lowbit_optim

ROOT = Path(__file__).parent.parent
# Runs after torch and torchao were imported; what sets up CUDA, as reading a device's properties does, is taken away.
IMPORT = """
import sys, torch, torchao
def touched(*args, **kwargs):
    raise AssertionError("a GPU was touched")
torch.cuda._lazy_init = touched
before = set(sys.modules)
import lowbit_optim
print(*sorted(set(sys.modules) - before))
"""


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Standard output of a command that sees no checkout but PYTHONPATH's."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    result = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# --- Distributions --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    # with this environment's setuptools, so that nothing is downloaded
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def test_the_version_is_in_one_place(distributions: dict[str, Path]) -> None:
    version = lowbit_optim.__version__
    assert distributions["wheel"].name == f"lowbit_optim-{version}-py3-none-any.whl"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert version not in (ROOT / "pyproject.toml").read_text().split("[tool.")[0]


def test_the_wheel_has_the_package_and_nothing_else(distributions: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(distributions["wheel"]).namelist())
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "lowbit_optim").rglob("*.py")} | {
        "lowbit_optim/py.typed"
    }
    info = f"lowbit_optim-{lowbit_optim.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == package
    assert f"{info}licenses/LICENSE" in names


def test_the_sdist_has_what_its_tests_need(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    folders = ("lowbit_optim", "test", "docs", "benchmarks")
    sources = [p for folder in folders for end in ("*.py", "*.md", "*.json") for p in (ROOT / folder).rglob(end)]
    needed = {p.relative_to(ROOT).as_posix() for p in sources} | {"README.md", "CONTRIBUTING.md", "pyproject.toml"}
    assert needed - inside == set()
    assert [name for name in inside if "__pycache__" in name] == []


def test_the_wheel_works_in_a_clean_environment(distributions: dict[str, Path], tmp_path: Path) -> None:
    """One that has torch and torchao from here, and nothing of the checkout."""
    venv.create(tmp_path / "venv")
    python = next((tmp_path / "venv").glob("[bS]*/python*"))
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", distributions["wheel"], folder=tmp_path)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip()
    packages = {str(Path(module.__file__).parent.parent) for module in (torch, torchao)}
    Path(site, "packages.pth").write_text("\n".join(packages))  # .pth files in there, of a checkout, are not read
    smoke = Path(__file__).parent / "smoke.py"
    assert site in run(python, smoke, folder=tmp_path, TORCH_COMPILE_DISABLE="1")


# --- Import ---------------------------------------------------------------------------------------------------------


def test_importing_costs_no_other_package_and_touches_no_gpu(tmp_path: Path) -> None:
    """What torch and torchao do not import themselves is imported where it is used."""
    imported = run(sys.executable, "-c", IMPORT, folder=tmp_path, PYTHONPATH=str(ROOT)).split()
    assert "lowbit_optim.lion" in imported
    assert [name for name in imported if name.partition(".")[0] not in ("lowbit_optim", "torch")] == []
    own = [name for name in imported if name.startswith("lowbit_optim")]
    assert [name for name in own if "fused" in name or "int8" in name] == []
    assert len(imported) - len(own) <= 3, "parts of torch that it would not have imported"
