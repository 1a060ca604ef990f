"""`inspect` and `why` say what is in an artifact and what makes two artifacts differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_samples import sample_plan, write_artifact

from cann_export.inspect import describe, inspect_artifact
from cann_export.why import differences, why
from cann_runtime.errors import ArtifactError


def test_the_description_holds_what_was_written(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path / "a", weights=True)
    d = describe(tmp_path / "a")
    assert d["fingerprint"] == manifest.fingerprint
    assert [(g["phase"], g["bucket"]["tokens"], g["ranks"]) for g in d["graphs"]] == [
        ("decode", 4, [0, 1]),
        ("prefill", 64, [0, 1]),
    ]
    assert d["layers"]["decode"]["middle"]["histogram"] == {"MatMul": 4, "RmsNorm": 2}
    assert d["kv_cache"]["bytes_per_block"] == 2 * 2 * 1 * 4 * 16 * 4
    # gate_up 8 x 6, down 8 x 3, norm 6, cos 16 x 4, all float32, and one int64; three matrices 8 x 6 and a vector.
    assert d["weights"]["bytes_per_rank"] == 4 * (48 + 24 + 6 + 64) + 8
    assert d["weights"]["source_elements"] == 3 * 48 + 6
    assert d["weights"]["parameters"] == {"weight": 3, "rope_cos": 1, "rank_offset": 1}
    on_disk = {p for p in (tmp_path / "a").rglob("*") if p.is_file() and p.name != "manifest.sha256"}
    assert {tmp_path / "a" / f["file"] for f in d["files"]} == on_disk
    assert d["bytes"] == sum(p.stat().st_size for p in on_disk)
    assert all(f["use"] for f in d["files"])


def test_json_is_plain_and_tables_name_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_artifact(tmp_path / "a", weights=True)
    inspect_artifact(tmp_path / "a", as_json=True)
    assert json.loads(capsys.readouterr().out) == describe(tmp_path / "a")
    inspect_artifact(tmp_path / "a")
    out = capsys.readouterr().out
    for word in ("sample", "ascend910b", "tp 2", "decode", "prefill", "0-1", "RmsNorm 2", "weight plan"):
        assert word in out


def test_a_damaged_artifact_is_not_described(tmp_path: Path) -> None:
    write_artifact(tmp_path / "a")
    next((tmp_path / "a" / "objects").iterdir()).write_bytes(b"x")
    with pytest.raises(ArtifactError, match="damaged"):
        describe(tmp_path / "a")
    with pytest.raises(ArtifactError, match="missing"):
        why(tmp_path / "a" / "nowhere", tmp_path / "a")


def test_inspecting_needs_no_torch(tmp_path: Path) -> None:
    write_artifact(tmp_path / "a")
    code = (
        "import sys; from pathlib import Path\n"
        "from cann_export.inspect import describe; from cann_export.why import why\n"
        "describe(Path(sys.argv[1])); why(Path(sys.argv[1]), Path(sys.argv[1]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


def test_equal_artifacts_have_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_artifact(tmp_path / "a")
    write_artifact(tmp_path / "b")
    assert why(tmp_path / "a", tmp_path / "b") == 0
    out = capsys.readouterr().out
    assert "the graphs are the same" in out
    assert out.count("\n") == 1


def test_differing_fields_are_named_with_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"architecture": {"rope": {"theta": 1e4}, "layers": 2}, "weights": "aa", "buckets": [1, 2, 4]}
    other = {"architecture": {"rope": {"theta": 1e6}, "layers": 2, "bias": True}, "weights": "bb", "buckets": [1, 4, 8]}
    write_artifact(tmp_path / "a", fingerprint_fields=fields, fingerprint="a" * 64)
    write_artifact(tmp_path / "b", tp=1, fingerprint_fields=other, fingerprint="b" * 64)
    write_artifact(tmp_path / "c", fingerprint_fields=other, fingerprint="b" * 64)
    assert why(tmp_path / "a", tmp_path / "b") == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "architecture.rope.theta: 10000.0 / 1000000.0" in lines
    assert "architecture.bias: (absent) / true" in lines
    assert "buckets: [2] / [8]" in lines
    assert 'weights: "aa" / "bb"' in lines
    assert len(lines) == 5, "a field that is equal is not named; the sources of the two plans are the same"


def test_tensors_behind_the_hash_of_the_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cann_export.package import ArtifactWriter

    for name, columns in (("a", 6), ("b", 8)):
        manifest = write_artifact(tmp_path / name, fingerprint_fields={"weights": name}, fingerprint=name)
        contents = {p.name: p.read_bytes() for p in (tmp_path / name / "objects").iterdir()}
        with ArtifactWriter(tmp_path / name) as writer:
            for content in contents.values():
                writer.add_object(content)
            plan = writer.add_weight_plan(sample_plan(columns=columns))
            writer.finish(manifest.model_copy(update={"weight_plan": plan, "tokenizer": {}}))
    assert why(tmp_path / "a", tmp_path / "b") == 1
    assert "model.norm.weight: [6] / [8]" in capsys.readouterr().out


def test_same_graphs_with_other_limits_or_bytes_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_artifact(tmp_path / "a")
    write_artifact(tmp_path / "b", max_num_blocks=64)
    assert why(tmp_path / "a", tmp_path / "b") == 0
    assert "max_num_blocks: null / 64" in capsys.readouterr().out
    fields = {"text": "one", "config": {"hidden_size": 8, "layers": 2}}
    write_artifact(tmp_path / "c", "two", fingerprint_fields=fields)
    assert why(tmp_path / "a", tmp_path / "c") == 0
    assert "not reproducible" in capsys.readouterr().out


def test_lists_that_differ_in_order_only_are_shown_whole() -> None:
    assert differences({"x": [1, 2]}, {"x": [2, 1]}) == [("x", [1, 2], [2, 1])]
    assert differences({"x": [{"a": 1}, {"a": 2}]}, {"x": [{"a": 2}, {"a": 3}]}) == [("x", [{"a": 1}], [{"a": 3}])]
    assert differences({"x": {"y": 1}}, {"x": 1}) == [("x", {"y": 1}, 1)]
