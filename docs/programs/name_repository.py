"""Names the repository in what is uploaded: `name_repository.py https://github.com/OWNER/NAME TAG`.

The files in the repository do not name it, so that a fork or a move makes none of them wrong. A release has
`[project.urls]`, and a README whose links lead from the page of the package index into the repository. The workflow
`checks.yml` calls this before it builds; what it changes here is not meant to be committed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!\[[^\]]*)?\]\((?!https?:|#)([^)]+)\)")


def urls(repository: str) -> str:
    """Returns the table `[project.urls]` for a repository on GitHub."""
    owner, name = repository.rsplit("/", 2)[1:]
    return (
        "\n[project.urls]\n"
        f'Source = "{repository}"\n'
        f'Documentation = "https://{owner.lower()}.github.io/{name}/"\n'
        f'Changelog = "{repository}/blob/main/CHANGELOG.md"\n'
        f'Issues = "{repository}/issues"\n'
    )


def with_full_links(readme: str, repository: str, tag: str) -> str:
    """Returns a document at the root with links that lead to its files of a tag from anywhere."""
    return LINK.sub(
        lambda link: f"{link[1] or ''}]({repository}/{'raw' if link[1] else 'blob'}/{tag}/{link[2]})", readme
    )


def main(root: Path, repository: str, tag: str) -> None:
    repository = repository.rstrip("/")
    metadata, readme = root / "pyproject.toml", root / "README.md"
    metadata.write_text(metadata.read_text() + urls(repository))
    readme.write_text(with_full_links(readme.read_text(), repository, tag))


if __name__ == "__main__":
    main(ROOT, *sys.argv[1:])
