"""Credentials for object stores, where obstore finds none itself."""

from pathlib import Path

import pytest

from millstream.sources.remote import credentials
from millstream.sources.remote.credentials import azure_options, gcs_options, s3_options

VARIABLES = ["AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"]


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without any, on a machine that is in no cloud."""
    for name in {*VARIABLES, *credentials._SOURCES, *credentials._AZURE_SOURCES, "GOOGLE_APPLICATION_CREDENTIALS"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store")
    monkeypatch.setattr(credentials, "_runs_on", lambda _: False)
    (tmp_path / ".aws").mkdir()


def test_without_credentials_access_is_anonymous() -> None:
    """Public objects can be read, and nothing waits for instance metadata."""
    assert s3_options("bucket") == {"endpoint": "http://store", "region": "us-east-1", "skip_signature": True}
    assert gcs_options() == azure_options() == {"skip_signature": True}


def test_profiles_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default one, or that of `$AWS_PROFILE`, which wins over keys in the environment."""
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-west-1\n[profile two]\nregion = eu-west-2\n")
    profiles = [
        f"[{name}]\naws_access_key_id = {name}-id\naws_secret_access_key = {name}-key\n" for name in ("default", "two")
    ]
    (tmp_path / ".aws" / "credentials").write_text("".join(profiles))
    one = {"endpoint": "http://store", "region": "eu-west-1"}
    assert s3_options("bucket") == {**one, "access_key_id": "default-id", "secret_access_key": "default-key"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    assert s3_options("bucket") == {"endpoint": "http://store", "region": "us-east-1"}
    monkeypatch.setenv("AWS_PROFILE", "two")
    two = {"endpoint": "http://store", "region": "eu-west-2"}
    assert s3_options("bucket") == {**two, "access_key_id": "two-id", "secret_access_key": "two-key"}


def test_what_the_clouds_tools_left_is_obstores_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's default credentials, and the metadata of machines in a cloud."""
    (tmp_path / ".config/gcloud").mkdir(parents=True)
    (tmp_path / ".config/gcloud/application_default_credentials.json").write_text("{}")
    assert gcs_options() == {}
    monkeypatch.setattr(credentials, "_runs_on", lambda vendor: vendor == "Amazon")
    assert "skip_signature" not in s3_options("bucket")
