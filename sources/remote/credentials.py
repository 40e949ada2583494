"""Credentials for object stores that obstore does not find itself.

obstore reads environment variables, Google's default credentials, and the instance metadata of cloud machines. It does
not read AWS profiles, and without credentials it waits for instance metadata instead of accessing a store anonymously.
"""

import configparser
import os
from pathlib import Path
from typing import Any

_FIELDS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
}
"""Options of obstore by their names in AWS profiles."""

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
        if "access_key_id" not in options and not _runs_on("Amazon"):
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
    default = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    has_credentials = given & os.environ.keys() or "GOOGLE_SERVICE_ACCOUNT_KEY" in os.environ or default.exists()
    return {} if has_credentials or _runs_on("Google") else {"skip_signature": True}


def azure_options() -> dict[str, Any]:
    """Returns the options of a client for Azure Blob Storage, whose account is `$AZURE_STORAGE_ACCOUNT_NAME`."""
    return {} if _AZURE_SOURCES & os.environ.keys() or _runs_on("Microsoft") else {"skip_signature": True}


def _profile() -> dict[str, str]:
    """Returns the options in the AWS profile `$AWS_PROFILE`, or in the default profile."""
    name = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    for variable, path, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        profiles = configparser.RawConfigParser()
        profiles.read(Path(os.environ.get(variable, path)).expanduser(), encoding="utf-8")
        if profiles.has_section(section):
            found |= {
                ours: profiles[section][theirs] for theirs, ours in _FIELDS.items() if theirs in profiles[section]
            }
    return found


def _runs_on(vendor: str) -> bool:
    """Returns True if this machine belongs to a cloud, and so has instance metadata."""
    for name in ("sys_vendor", "product_name", "bios_vendor"):
        try:
            if vendor in Path("/sys/devices/virtual/dmi/id", name).read_text(encoding="utf-8"):
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
