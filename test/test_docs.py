"""The Python snippets in the README and in docs/ run as printed, and the links between the pages lead somewhere."""

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def snippets(page: Path) -> list[str]:
    """Each snippet behind as many empty lines as stand before it, so that an error names the page's own line."""
    text = page.read_text()
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in SNIPPET.finditer(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page run in order in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippets"}
    with torch.compiler.set_stance("force_eager"):  # what is compiled is tested elsewhere, and compiling takes long
        for code in snippets(page):
            exec(compile(code, page.name, "exec"), namespace)


@by_page
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    """In bold and in quotes; … stands for what differs."""
    sources = [path.read_text() for path in (ROOT / "lowbit_optim").rglob("*.py")]
    strings = {n.value for source in sources for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)}
    messages = "\n".join(string for string in strings if isinstance(string, str))
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    quotes = re.findall(r'\*\*"(.*?)"\.?\*\*', page)
    assert len(quotes) >= 10
    parts = [part.strip(" ,") for quote in quotes for part in quote.split("…")]
    assert [part for part in parts if part not in messages] == []


def test_the_readme_has_snippets() -> None:
    assert len(snippets(ROOT / "README.md")) >= 2
