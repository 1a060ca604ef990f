"""An artifact opens whole and unharmed, or not at all, with one line that says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from artifact_samples import constants, sample_plan, write_artifact

from cann_runtime.artifact.manifest import SCHEMA_VERSION, StoredFile, Target
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "a", weights=True)
    return tmp_path / "a"


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(path: Path, **changes: object) -> None:
    """Change the manifest as an edit by hand does: without its recorded hash."""
    document = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(document))
    (path / "manifest.sha256").unlink(missing_ok=True)


def test_everything_written_is_read_back(artifact: Path) -> None:
    opened = Artifact.open(artifact, world_size=2)
    graph = opened.manifest.graphs[0]
    assert opened.object_path(graph.object).read_bytes() == b"one" * 100
    assert opened.signature(graph.signature).outputs[0].shape == [-1, 8]
    assert opened.plan() == sample_plan()
    assert opened.constants().keys() == {"inv_freq"}
    assert torch.equal(opened.constants()["inv_freq"], constants()["inv_freq"])
    assert opened.tokenizer_dir is not None
    assert json.loads((opened.tokenizer_dir / "tokenizer.json").read_text()) == {"text": "one"}
    assert opened.weights_path(1) == artifact / "weights" / "rank1.safetensors"
    assert opened.weights_path(3) == opened.weights_path(1), "ranks of two dp groups share the weights of a tp rank"
    with pytest.raises(ArtifactError, match="no object"):
        opened.object_path("0" * 64)


def test_a_flipped_byte_in_any_file_is_found(artifact: Path) -> None:
    files = [p for p in artifact.rglob("*") if p.is_file() and p.name != "manifest.sha256"]
    assert {p.parent.name for p in files} == {"a", "objects", "tokenizer", "weights"}
    for path in files:
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            with pytest.raises(ArtifactError) as caught:
                Artifact.open(artifact).weights_path(int(path.stem[-1]) if path.parent.name == "weights" else 0)
            message = str(caught.value)
            assert path.name in message
            assert "\n" not in message
        path.write_bytes(content)
    Artifact.open(artifact).weights_path(0)


@pytest.mark.parametrize("folder", ["objects", "tokenizer", "weights", "."])
def test_missing_and_truncated_files_are_named(artifact: Path, folder: str) -> None:
    for path in [p for p in (artifact / folder).iterdir() if p.is_file() and p.name != "manifest.sha256"]:
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert path.name in refusal(artifact)
        path.unlink()
        message = refusal(artifact)
        assert path.name in message
        assert "missing" in message
        path.write_bytes(content)


def test_large_packed_weights_are_hashed_on_demand(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact / "weights" / "rank0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr("cann_runtime.artifact.store.HASH_LIMIT", 8)
    assert Artifact.open(artifact).weights_path(0) == path
    with pytest.raises(ArtifactError, match=r"rank0\.safetensors is damaged"):
        Artifact.open(artifact, verify=True).weights_path(0)


def test_foreign_schema_names_both_versions(artifact: Path) -> None:
    edit(artifact, schema_version=7, a_field_of_the_future=1)
    message = refusal(artifact)
    assert "schema version 7" in message
    assert f"reads {SCHEMA_VERSION}:" in message
    (artifact / "manifest.json").write_text("[]")
    assert "schema version None" in refusal(artifact)


def test_broken_manifest_is_one_line(artifact: Path) -> None:
    edit(artifact, vocab_size="many")
    assert "vocab_size" in refusal(artifact)
    edit(artifact, vocab_size=8, surprise=1)
    assert "surprise" in refusal(artifact)
    (artifact / "manifest.json").write_bytes(b"\xff\x00")
    assert "not JSON" in refusal(artifact)
    assert "not an artifact" in refusal(artifact / "objects")
    assert "not a folder" in refusal(artifact / "manifest.json")


def test_an_edited_manifest_is_noticed(artifact: Path) -> None:
    text = (artifact / "manifest.json").read_text()
    (artifact / "manifest.json").write_text(text.replace('"vocab_size": 8', '"vocab_size": 9'))
    assert "edited" in refusal(artifact)


def test_world_size_must_fit(artifact: Path) -> None:
    message = refusal(artifact, world_size=4)
    assert "exported for 2 ranks" in message
    assert "has 4" in message


def test_cpu_graphs_need_their_torch(tmp_path: Path) -> None:
    cpu = Target(kind="cpu", isa="avx2")
    write_artifact(tmp_path / "old", target=cpu, toolchain={"torch": "1.13.1"})
    message = refusal(tmp_path / "old")
    assert "1.13.1" in message
    assert torch.__version__ in message
    assert Artifact.open(tmp_path / "old", check_host=False).manifest.toolchain == {"torch": "1.13.1"}
    major, minor, _ = torch.__version__.split(".", 2)
    write_artifact(tmp_path / "same", target=cpu, toolchain={"torch": f"{major}.{minor}.99"})
    Artifact.open(tmp_path / "same")
    write_artifact(tmp_path / "ascend", toolchain={"torch": "1.13.1"})
    Artifact.open(tmp_path / "ascend")


def test_names_never_reach_outside_the_folder(artifact: Path) -> None:
    outside = StoredFile(sha256="0" * 64, size=1).model_dump()
    edit(artifact, tokenizer={"../secret": outside})
    assert "outside its folder" in refusal(artifact)
    edit(artifact, tokenizer={}, weights={"../0": outside})
    assert "rank that does not exist" in refusal(artifact)
    document = json.loads((artifact / "manifest.json").read_text())
    edit(artifact, weights={}, objects=document["objects"] | {"../../etc/passwd": 1})
    assert "not named by a sha256" in refusal(artifact)


def test_references_must_be_listed(artifact: Path) -> None:
    document = json.loads((artifact / "manifest.json").read_text())
    document["graphs"][1]["object"] = "f" * 64
    edit(artifact, graphs=document["graphs"])
    assert "prefill graph" in refusal(artifact)


def test_moved_read_only_and_linked_artifacts_open(artifact: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "b"
    moved.parent.mkdir()
    shutil.move(artifact, moved)
    shared = tmp_path / "shared"
    shutil.move(moved / "objects", shared)
    (moved / "objects").mkdir()
    for path in shared.iterdir():
        (moved / "objects" / path.name).symlink_to(path)
    for parent, _, names in os.walk(tmp_path):
        for name in names:
            if not (path := Path(parent, name)).is_symlink():
                path.chmod(0o444)
    (moved / "objects").chmod(0o555)
    moved.chmod(0o555)
    opened = Artifact.open(moved)
    assert opened.weights_path(0) is not None
    assert opened.plan() == sample_plan()
    moved.chmod(0o755)


def test_an_artifact_exchanged_while_it_is_opened_is_opened_again(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Artifact._check_files
    calls: list[str] = []

    def exchange_first(self: Artifact) -> None:
        calls.append(self.manifest.fingerprint)
        if len(calls) == 1:
            write_artifact(artifact, "two")
        real(self)

    monkeypatch.setattr(Artifact, "_check_files", exchange_first)
    opened = Artifact.open(artifact)
    assert opened.manifest.fingerprint_fields["text"] == "two"
    assert len(calls) == 2


def test_files_that_an_exchange_took_away_are_said_to_be_replaced(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    write_artifact(artifact, "two", weights=True)
    with pytest.raises(ArtifactError, match="was replaced by another export"):
        opened.weights_path(0)
    with pytest.raises(ArtifactError, match="was replaced by another export"):
        opened.object_path(opened.manifest.graphs[0].object)
