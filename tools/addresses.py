"""Write the public address of the project into its files, before the site or a release is built.

    python tools/addresses.py https://github.com/OWNER/NAME

The address of the repository is the only variable. The site is at the address that GitHub Pages
gives to it. A run with the same address does nothing, and one with another address is refused.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = "examples/quickstart.ipynb"
_ADDRESS = re.compile(
    r"^(repo_url|\[project\.urls\]|repository-code:)|colab\.research", re.MULTILINE
)


def write(repository: str, root: pathlib.Path = ROOT) -> None:
    """Add the addresses to the metadata, the README and the notebook, which gets a link to Colab.

    Args:
      repository: Such as "https://github.com/OWNER/NAME".
      root: The checkout.
    """
    found = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+)", repository)
    if found is None:
        raise SystemExit(f"{repository!r} is not https://github.com/OWNER/NAME")
    owner, name = found.groups()
    site = f"https://{owner.lower()}.github.io/{name}/"
    urls = {
        "Documentation": site,
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    table = "".join(f'{key} = "{url}"\n' for key, url in urls.items())
    colab = f"https://colab.research.google.com/github/{owner}/{name}/blob/main/{NOTEBOOK}"
    badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})"
    # File -> texts that are there once, and what takes their place.
    changes = {
        "zensical.toml": {
            "\ndocs_dir =": f'\nsite_url = "{site}"\nrepo_url = "{repository}"\ndocs_dir ='
        },
        "pyproject.toml": {
            "\n[project.optional-dependencies]": f"\n[project.urls]\n{table}"
            "\n[project.optional-dependencies]"
        },
        "CITATION.cff": {"\nlicense:": f"\nrepository-code: {repository}\nurl: {site}\nlicense:"},
        "README.md": {f"]({NOTEBOOK}):": f"]({NOTEBOOK})/[Colab]({colab}):"},
        NOTEBOOK: {
            '    "# shardwright': f'    "{badge}\\n",\n    "\\n",\n    "# shardwright',
            # Colab opens the notebook without the files beside it.
            " ./shardwright": f" git+{repository}",
        },
    }
    for file, pairs in changes.items():
        path = root / file
        text = path.read_text(encoding="utf-8")
        known = _ADDRESS.search(text)
        for old, new in pairs.items():
            if new in text:
                continue
            if known or text.count(old) != 1:
                raise SystemExit(f"{file} has another address: remove it first")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(sys.argv[1])
