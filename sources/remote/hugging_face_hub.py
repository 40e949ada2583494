"""Files of datasets on the Hugging Face Hub, `hf://datasets/ORG/NAME@REVISION/PATH`.

huggingface_hub lists the files and finds the user's token. obstore reads the files by HTTP. The client sends the token
only to the Hub itself: it drops the token when the Hub redirects it to another host, as it does for large files.
"""

import urllib.parse
from typing import Any

from millstream.errors import DataSourceError

_ALIASES = {"~parquet": "refs/convert/parquet", "~duckdb": "refs/convert/duckdb"}
"""Short names of the revisions into which the Hub converts datasets, as in huggingface_hub."""


def dataset_of(root: str) -> tuple[str, str]:
    """Returns the name, `ORG/NAME`, and the revision of the dataset at the root of a URL."""
    name, _, revision = root.removeprefix("datasets/").partition("@")
    return name, _ALIASES.get(revision, urllib.parse.unquote(revision)) or "main"


def split_hub_path(path: str) -> tuple[str, str]:
    """Splits the path of a URL into the dataset, `datasets/ORG/NAME@REVISION`, and the path of the file in it.

    Both are empty if the path is not of this form.
    """
    names = path.split("/", 3)
    if len(names) < 4 or names[0] != "datasets" or not all(names):
        return "", ""
    return "/".join(names[:3]), names[3]


def address_of(root: str) -> tuple[str, dict[str, str]]:
    """Returns the address of a dataset's files, and the headers that a request needs."""
    hub = _library()
    (name, revision), token = dataset_of(root), hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return f"{hub.constants.ENDPOINT}/datasets/{name}/resolve/{urllib.parse.quote(revision, safe='')}", headers


def list_files(root: str, folder: str) -> list[str]:
    hub = _library()
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415

    name, revision = dataset_of(root)
    try:
        entries = hub.HfApi().list_repo_tree(
            name, folder or None, recursive=True, revision=revision, repo_type="dataset"
        )
        return [entry.path for entry in entries if isinstance(entry, hub.hf_api.RepoFile)]
    except EntryNotFoundError:
        return []
    except RepositoryNotFoundError as error:
        raise DataSourceError(
            f"Cannot list hf://{root}: it does not exist, or this user may not read it. Check the name, and log in "
            "with `hf auth login` if it is private or gated."
        ) from error
    except Exception as error:  # The errors of a connection are those of the library's HTTP client.
        raise DataSourceError(f"Cannot list hf://{root}: {' '.join(str(error).split())[:200]}.") from error


def _library() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.hf_api  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Cannot read from hf:// without huggingface_hub: pip install huggingface_hub.") from error
    return huggingface_hub
