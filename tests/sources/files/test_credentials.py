"""Credentials for object stores, where obstore finds none itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import DataSourceError
from millstream.sources.remote import object_clients
from millstream.sources.remote.object_clients import azure_options, gcs_options, s3_options

VARIABLES = ["AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"]


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without any, on a machine that is in no cloud."""
    for name in {
        *VARIABLES,
        *object_clients._SOURCES,
        *object_clients._AZURE_SOURCES,
        "GOOGLE_APPLICATION_CREDENTIALS",
    }:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store")
    monkeypatch.setattr(object_clients, "_runs_on", lambda _: False)
    (tmp_path / ".aws").mkdir()


def test_without_credentials_access_is_anonymous() -> None:
    """Public objects can be read, and nothing waits for instance metadata."""
    assert s3_options("bucket") == {"endpoint": "http://store", "region": "us-east-1", "skip_signature": True}
    assert gcs_options() == azure_options() == {"skip_signature": True}


def test_profiles_are_those_of_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default one, or that of `$AWS_PROFILE`, which wins over keys in the environment: keys, or a process."""
    keys = json.dumps({"Version": 1, "AccessKeyId": "process-id", "SecretAccessKey": "process-key"})
    (tmp_path / "keys.json").write_text(keys)
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-1\n"
        f"[profile two]\nregion = eu-west-2\ncredential_process = cat {tmp_path}/keys.json\n[profile none]\n"
    )
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_access_key_id = id\naws_secret_access_key = key\n")

    def found() -> list[Any]:
        options = s3_options("bucket")
        provider = options.pop("credential_provider", None)
        assert options.pop("endpoint") == "http://store"
        return [options, provider and [provider()[name] for name in ("access_key_id", "secret_access_key")]]

    assert found() == [{"region": "eu-west-1"}, ["id", "key"]]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    assert found() == [{"region": "us-east-1"}, None]
    monkeypatch.setenv("AWS_PROFILE", "two")
    assert found() == [{"region": "eu-west-2"}, ["process-id", "process-key"]]
    monkeypatch.setenv("AWS_PROFILE", "none")
    assert found() == [{"region": "us-east-1", "skip_signature": True}, None]
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(DataSourceError, match=r"^Cannot read the AWS profile 'missing': .*could not be found\.$"):
        found()


def test_what_the_clouds_tools_left_is_obstores_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's default object_clients, and the metadata of machines in a cloud."""
    (tmp_path / ".config/gcloud").mkdir(parents=True)
    (tmp_path / ".config/gcloud/application_default_credentials.json").write_text("{}")
    assert gcs_options() == {}
    monkeypatch.setattr(object_clients, "_runs_on", lambda vendor: vendor == "Amazon")
    assert "skip_signature" not in s3_options("bucket")
