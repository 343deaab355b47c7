"""Write the public address of the project into its metadata, before the site or a release is built.

    python tools/addresses.py https://github.com/OWNER/NAME

The address of the repository is the only variable. The site is at the address that GitHub Pages
gives to it. A run with the same address does nothing, and one with another address is refused.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def write(repository: str, root: pathlib.Path = ROOT) -> None:
    """Add the addresses to zensical.toml, pyproject.toml and CITATION.cff.

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
    added = {
        "zensical.toml": ("docs_dir =", f'site_url = "{site}"\nrepo_url = "{repository}"\n'),
        "pyproject.toml": ("[project.optional-dependencies]", f"[project.urls]\n{table}\n"),
        "CITATION.cff": ("license:", f"repository-code: {repository}\nurl: {site}\n"),
    }
    for file, (before, lines) in added.items():
        path = root / file
        text = path.read_text(encoding="utf-8")
        if re.search(r"^(repo_url|\[project\.urls\]|repository-code:)", text, re.MULTILINE):
            if lines not in text:
                raise SystemExit(f"{file} has another address: remove it first")
        else:
            path.write_text(text.replace(f"\n{before}", f"\n{lines}{before}", 1), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(sys.argv[1])
