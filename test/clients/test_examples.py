"""Each example runs as it stands, and says that resuming changed nothing."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
from comparing import EXAMPLES

SAME = "resumed run has the same weights: True"
PACKAGES = {
    "accelerate_fsdp2": ["accelerate"],
    "hf_trainer": ["transformers", "accelerate"],
    "lightning_module": ["lightning"],
    "peft_lora": ["peft", "transformers"],
    "timm_images": ["timm"],
    "torchtitan_container": ["torchtitan"],
}
TAKE_A_FOLDER = {"accelerate_fsdp2", "torchtitan_container"}


def output(name: str, folder: Path) -> str:
    printed = io.StringIO()
    arguments = [name, *([str(folder)] if name in TAKE_A_FOLDER else [])]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PACKAGES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    assert SAME in output(name, tmp_path)
