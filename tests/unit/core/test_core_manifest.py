"""Adapter manifests refuse what is empty, repeated, edited or of another schema."""

import dataclasses

import pytest

from tidemill.core.errors import ManifestError
from tidemill.core.manifest import AdapterManifest, TensorEntry


def entry(name: str, digest: str = "sha256:00") -> TensorEntry:
    return TensorEntry(name, "float32", (2, 3), 24, digest)


def build(*names: str) -> AdapterManifest:
    return AdapterManifest.build(
        version=3, base_digest="sha256:b", config_digest="sha256:c", created_step=2, previous="sha256:p",
        tensors=[entry(n) for n in names],
    )


def test_round_trip_sorts_and_keeps_the_digest() -> None:
    manifest = build("b", "a")
    assert [t.name for t in manifest.tensors] == ["a", "b"]
    assert manifest.total_bytes == 48
    assert AdapterManifest.from_json(manifest.to_json()) == manifest


def test_empty_and_repeated_are_refused() -> None:
    with pytest.raises(ManifestError, match="no tensors"):
        build()
    with pytest.raises(ManifestError, match="a twice"):
        build("a", "a")


@pytest.mark.parametrize("change", [
    {"version": 4}, {"base_digest": "sha256:x"}, {"previous": "sha256:y"}, {"count": 2}, {"total_bytes": 1},
    {"schema": "adapter-manifest/2"}, {"created_step": 9},
])
def test_an_edited_manifest_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ManifestError):
        AdapterManifest.from_json(build("a").to_json() | change)


def test_an_edited_tensor_or_a_missing_field_is_refused() -> None:
    data = build("a").to_json()
    data["tensors"][0]["sha256"] = "sha256:11"
    with pytest.raises(ManifestError, match="manifest_sha256"):
        AdapterManifest.from_json(data)
    data.pop("version")
    with pytest.raises(ManifestError, match="malformed"):
        AdapterManifest.from_json(data)
    with pytest.raises(ManifestError):
        dataclasses.replace(build("a"), manifest_sha256="sha256:0").verify()
