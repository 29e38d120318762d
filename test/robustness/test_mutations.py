"""The lines that mutations.py breaks are still there; CONTRIBUTING.md says how it is run by hand."""

import shutil
from pathlib import Path

import pytest
from mutations import MUTATIONS, ROOT, Mutation, apply


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_can_be_applied(mutation: Mutation, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lowbit_optim", tmp_path / "lowbit_optim")
    apply(mutation, tmp_path)
    text = (tmp_path / "lowbit_optim" / mutation.file).read_text()
    compile(text, mutation.file, "exec")
    assert all((ROOT / test).is_file() for test in mutation.tests.split())
