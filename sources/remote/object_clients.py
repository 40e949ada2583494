"""Clients of object stores: the configuration of obstore, its credentials, and the Hugging Face Hub.

obstore reads environment variables, Google's default credentials, and the instance metadata of cloud machines. AWS
profiles are read by boto3, through obstore's provider: keys, roles, single sign-on, processes. Without credentials,
obstore would wait for instance metadata instead of accessing a store anonymously.

The files of datasets on the Hub are `hf://datasets/ORG/NAME@REVISION/PATH`. huggingface_hub lists them and finds the
user's token; obstore reads them by HTTP. The client sends the token only to the Hub itself: it drops the token when the
Hub redirects it to another host, as it does for large files.

Guarantees:
    - obstore is imported, and its threads start, only in a process that reads from a store, when it first reads.
    - A process that was forked afterwards gets an error, because obstore would wait forever there.
"""

import functools
import os
from typing import Any

from millstream.errors import DataSourceError
from millstream.sources.reads import is_forked
from millstream.sources.remote.urls import Url, without_secrets

_PROFILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
"""The files of AWS profiles, by the variables that replace their paths."""

_SOURCES = {
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}
"""Environment variables with AWS credentials that obstore reads."""

_AZURE_SOURCES = {
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_USE_AZURE_CLI",
}
"""Environment variables with Azure credentials that obstore reads."""

_REGION_SECONDS = 10.0


def s3_options(bucket: str) -> dict[str, Any]:
    """Returns the options of a client for a bucket of S3, or of a compatible store at `$AWS_ENDPOINT_URL`."""
    options: dict[str, Any] = {}
    is_named = "AWS_PROFILE" in os.environ
    if is_named or not _SOURCES & os.environ.keys():
        options |= _profile()
        if "credential_provider" not in options and not _runs_on("Amazon"):
            options["skip_signature"] = True
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options["endpoint"] = endpoint
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or options.get("region")
    options["region"] = region or ("us-east-1" if endpoint else _region_of(bucket))
    return options


def gcs_options() -> dict[str, Any]:
    """Returns the options of a client for Google Cloud Storage, or for an emulator at `$STORAGE_EMULATOR_HOST`."""
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        return {"base_url": emulator if "://" in emulator else f"http://{emulator}", "skip_signature": True}
    given = {"GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"}
    default = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")  # noqa: PTH111  (pathlib is slow)
    has_credentials = given & os.environ.keys() or "GOOGLE_SERVICE_ACCOUNT_KEY" in os.environ or os.path.exists(default)  # noqa: PTH110
    return {} if has_credentials or _runs_on("Google") else {"skip_signature": True}


def azure_options() -> dict[str, Any]:
    """Returns the options of a client for Azure Blob Storage, whose account is `$AZURE_STORAGE_ACCOUNT_NAME`."""
    return {} if _AZURE_SOURCES & os.environ.keys() or _runs_on("Microsoft") else {"skip_signature": True}


def _profile() -> dict[str, Any]:
    """Returns the credentials and the region of the AWS profile `$AWS_PROFILE`, or else of the default one."""
    name = os.environ.get("AWS_PROFILE")
    files = (os.path.expanduser(os.environ.get(variable, path)) for variable, path in _PROFILES.items())  # noqa: PTH111
    if name is None and not any(map(os.path.exists, files)):
        return {}
    try:
        import botocore.exceptions  # noqa: PLC0415  (lazy: it takes long to import)
        import botocore.session  # noqa: PLC0415
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Cannot read AWS profiles without boto3: pip install 'millstream[remote]'.") from error
    session = botocore.session.Session(profile=name)
    try:
        # obstore reads instance metadata itself.
        session.get_component("credential_provider").remove("iam-role")
        found = {"region": session.get_config_variable("region")}
        if session.get_credentials():
            found["credential_provider"] = Boto3CredentialProvider(session)
    except botocore.exceptions.BotoCoreError as error:
        raise DataSourceError(
            f"Cannot read the AWS profile {name or 'default'!r}: {str(error).rstrip('.')}."
        ) from error
    return {option: value for option, value in found.items() if value}


def _runs_on(vendor: str) -> bool:
    """Returns True if this machine belongs to a cloud, and so has instance metadata."""
    for name in ("sys_vendor", "product_name", "bios_vendor"):
        try:
            with open(f"/sys/devices/virtual/dmi/id/{name}", encoding="utf-8") as file:  # noqa: PTH123
                if vendor in file.read():
                    return True
        except OSError:
            continue
    return False


def _region_of(bucket: str) -> str:
    """Returns the region of a bucket, which S3 reports without credentials."""
    import urllib.error  # noqa: PLC0415  (lazy: it takes long to import)
    import urllib.request  # noqa: PLC0415

    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_REGION_SECONDS) as answer:  # noqa: S310  (it is https)
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        return "us-east-1"
    return headers.get("x-amz-bucket-region") or "us-east-1"


_ALIASES = {"~parquet": "refs/convert/parquet", "~duckdb": "refs/convert/duckdb"}
"""Short names of the revisions into which the Hub converts datasets, as in huggingface_hub."""


def dataset_of(root: str) -> tuple[str, str]:
    """Returns the name, `ORG/NAME`, and the revision of the dataset at the root of a URL."""
    import urllib.parse  # noqa: PLC0415  (lazy: it takes long to import)

    name, _, revision = root.removeprefix("datasets/").partition("@")
    return name, _ALIASES.get(revision, urllib.parse.unquote(revision)) or "main"


def address_of(root: str) -> tuple[str, dict[str, str]]:
    """Returns the address of a dataset's files, and the headers that a request needs."""
    import urllib.parse  # noqa: PLC0415  (lazy, as above)

    hub = hub_library()
    (name, revision), token = dataset_of(root), hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return f"{hub.constants.ENDPOINT}/datasets/{name}/resolve/{urllib.parse.quote(revision, safe='')}", headers


def list_files(root: str, folder: str) -> list[str]:
    hub = hub_library()
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


def hub_library() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.hf_api  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Cannot read from hf:// without huggingface_hub: pip install huggingface_hub.") from error
    return huggingface_hub


ATTEMPTS = 8
"""Number of attempts if the store or the network fails."""

FIRST_DELAY_SECONDS = 0.25
"""Delay before the second attempt. Each further delay is twice as long, with jitter."""

LONGEST_DELAY_SECONDS = 8.0

CONNECT_SECONDS = 10.0

SILENCE_SECONDS = 20.0
"""Time without any bytes after which a connection is given up, and the request is repeated.

Otherwise requests on broken connections would block all others.
"""

REQUEST_SECONDS = 120.0
"""Limit of an attempt, and of the time in which attempts begin."""

_MAX_STORES = 256
"""Limit of the cached clients, one per bucket, host or signed URL."""

LIBRARY = "obstore"


def check_process(url: str) -> None:
    """Raises DataSourceError in a process that was forked after its parent had read from a store."""
    if is_forked(LIBRARY):
        raise DataSourceError(
            f"Cannot read {url!r} in this process: it was forked after its parent had read from a store, and the "
            "connections of the parent do not work here. Use worker_count, or start processes by 'spawn' or "
            "'forkserver'."
        )


def path_of(url: str, parsed: Url) -> str:
    """Returns the path of an object in obstore's form, which does not support all paths."""
    path = parsed.key.strip("/")
    if any(name in {"", ".", ".."} for name in path.split("/")):
        raise DataSourceError(f"Cannot read {url!r}: its path has an empty part, `.` or `..`. Rename the object.")
    return path


def store_of(url: str, parsed: Url, *, attempts: int | None = None) -> Any:
    check_process(url)
    try:
        return open_store(parsed.scheme, parsed.root, ATTEMPTS if attempts is None else attempts)
    except exceptions().BaseError as error:
        raise DataSourceError(f"Cannot read {url!r}: its store is not configured: {first_line(error)}.") from None


@functools.lru_cache(maxsize=_MAX_STORES)
def open_store(scheme: str, root: str, attempts: int) -> Any:
    stores = obstore().store
    address, headers = address_of(root) if scheme == "hf" else (f"{scheme}://{root}", {})
    connections = {
        "allow_http": not address.startswith("https:"),  # No redirect from https to http is followed.
        "default_headers": headers,
        "connect_timeout": f"{CONNECT_SECONDS * 1000:.0f}ms",
        "read_timeout": f"{SILENCE_SECONDS * 1000:.0f}ms",
        "timeout": f"{REQUEST_SECONDS * 1000:.0f}ms",
    }
    options = {"client_options": connections, "retry_config": _retry_options(attempts)}
    if scheme == "gs":
        return stores.GCSStore(root, **gcs_options(), **options)
    if scheme == "s3":
        return stores.S3Store(root, **s3_options(root), **options)
    if scheme == "az":
        return stores.AzureStore(root, **azure_options(), **options)
    return stores.HTTPStore.from_url(address, **options)


def _retry_options(attempts: int) -> dict[str, Any]:
    import datetime as dt  # noqa: PLC0415  (lazy: only readers of stores need it)

    return {
        "max_retries": attempts - 1,
        "backoff": {
            "init_backoff": dt.timedelta(seconds=FIRST_DELAY_SECONDS),
            "max_backoff": dt.timedelta(seconds=LONGEST_DELAY_SECONDS),
            "base": 2,
        },
        "retry_timeout": dt.timedelta(seconds=REQUEST_SECONDS),
    }


def first_line(error: Exception) -> str:
    """Returns the message of an error of obstore without secrets, and without the structures that it appends."""
    return without_secrets(str(error).partition("\n\n")[0]).strip()


def exceptions() -> Any:
    return obstore().exceptions


@functools.cache
def obstore() -> Any:
    try:
        import obstore as library  # noqa: PLC0415
        import obstore.exceptions  # noqa: PLC0415
        import obstore.store  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "Cannot read from gs://, s3://, az:// and http:// without obstore: pip install 'millstream[remote]'."
        ) from error
    return library
