"""The documentation as a site: `sphinx-build -W docs docs/_build`, with what `pip install -e '.[docs]'` brings."""

import re

from sphinx.application import Sphinx

import lowbit_optim

project = "lowbit_optim"
author = "the lowbit_optim authors"
version = release = lowbit_optim.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lowbit_optim {version}"

# The pages are read on GitHub, too: its anchors, its tables, and links to files beside them.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them, with shapes


def _link_files(app: Sphinx, page: str, source: list[str]) -> None:
    """README.md and its like are no pages of the site: a link to one leads to the file."""
    source[0] = re.sub(r"\]\(\.\./(\w+\.md)(#[\w-]*)?\)", r"](path:../\1)", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_files)
