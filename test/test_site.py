"""The documentation builds as a site without a warning: every link, anchor and docstring resolves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "cache", ROOT / "docs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([*command, tmp_path / "site"], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in (tmp_path / "site").glob("*.html")}
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("Lion8bit", "OptimState8bit", "float_state_dict", "convert_int8_mixed_precision"):
        assert f"{name}" in api
