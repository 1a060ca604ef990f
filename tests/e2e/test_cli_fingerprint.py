"""The fingerprint changes with all that changes a graph, and with nothing else.

Every field of two model configs is changed in turn: the fingerprint follows, or the field is on the list of those
that cannot change a graph, and then a trace with the changed value gives the same graph.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tiny_models import tiny_config

from cann_export.fingerprint import NOT_GRAPH, fingerprint, fingerprint_fields
from cann_export.model import DTYPES, build_model, make_config
from cann_export.shard import shard
from cann_export.trace import trace
from cann_runtime.artifact.manifest import Bucket, Target, World
from cann_runtime.recipe import Settings, parse_recipe, resolve

BUCKET = Bucket(tokens=4, seqs=4, rows=4, max_blocks=2)
TARGET = Target(kind="ascend", family="ascend910b", soc="Ascend910B3", cann="8.5.0")


def settings(config: dict[str, Any], **changes: Any) -> Settings:
    recipe = parse_recipe({"name": "tiny", "model": config, "target": "ascend910b"}, "test")
    return dataclasses.replace(resolve(recipe), **changes)


def of(s: Settings, config: Any = None, target: Target = TARGET, tools: dict[str, str] | None = None) -> str:
    """The fingerprint of these settings; `config` is the transformers config, by default that of the settings."""
    config = config or make_config(s.config)
    world = World(size=s.world, tp=s.tp, ep=s.ep, nnodes=s.nnodes)
    plan = shard(build_model(s.config, s.dtype, s.max_seq_len), s.tp)
    buckets = [("decode", Bucket(tokens=n, seqs=n, rows=n, max_blocks=2)) for n in s.decode_buckets]
    fields = fingerprint_fields(s, config, target, world, buckets, plan, {}, tools or {"torch": "2.13.0"})  # type: ignore[arg-type]
    return fingerprint(fields)


def graph_code(config: Any) -> str:
    """The traced step graph of a model config, as text."""
    values = config.to_dict()
    built = build_model(values, "float32", 64)
    shard(built, 1)
    program = trace(built, "decode", BUCKET, tp=1, block_size=16, kv_dtype=DTYPES["float32"])
    lines = [f"{n.op} {n.name} {n.target} {n.args} {n.kwargs} {n.meta.get('val')}" for n in program.gm.graph.nodes]
    return "\n".join([*lines, str([(k, r.inv_freq.tolist(), r.scaling) for k, r in built.ropes.items()])])


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 1.5 or 0.5
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, "x"]
    if isinstance(value, dict):
        return {key: changed(item) for key, item in value.items()} or {"x": 1}
    return 7  # for None


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_every_field_of_a_model_config(model_type: str) -> None:
    s = settings(tiny_config(model_type))
    config = make_config(s.config)
    before = of(s, config)
    assert before == of(s, make_config(s.config))
    code = graph_code(config)
    names = set(config.to_dict())
    assert len(names) > 25
    for name in sorted(names):
        values = config.to_dict()
        values[name] = changed(values[name])
        other = make_config(s.config)
        other.to_dict = lambda values=values: values
        after = of(s, other)
        if name not in NOT_GRAPH:
            assert after != before, f"{name} is not in the fingerprint"
            continue
        assert after == before, name
        fresh = make_config(s.config)
        if name in ("architectures", "transformers_version", "_attn_implementation", "torch_dtype", "dtype"):
            continue  # the class and the versions are hashed by other fields; dtype and attention are set by us
        setattr(fresh, name, changed(getattr(fresh, name, None)) if name != "use_cache" else False)
        assert graph_code(fresh) == code, f"{name} changes the graph"


def test_settings_that_change_a_graph() -> None:
    s = settings(tiny_config())
    before = of(s)
    for name, value in (
        ("dtype", "float16"),
        ("kv_dtype", "int8"),
        ("tp", 2),
        ("ep", 2),
        ("nnodes", 2),
        ("world", 2),
        ("max_batch_size", 8),
        ("max_seq_len", 128),
        ("block_size", 256),
        ("decode_buckets", (1, 3)),
    ):
        assert of(dataclasses.replace(s, **{name: value})) != before, name
    assert of(s, target=TARGET.model_copy(update={"cann": "9.0.0"})) != before
    assert of(s, target=TARGET.model_copy(update={"family": "ascend950"})) != before
    assert of(s, tools={"torch": "2.14.0"}) != before


def test_settings_that_change_no_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    s = settings(tiny_config())
    before = of(s)
    for name, value in (
        ("name", "another"),
        ("max_num_blocks", 777),
        ("checkpoint", str(tmp_path)),
        ("pack_weights", True),
        ("round_block_size", True),
        ("cann", "8.5.0"),
    ):
        assert of(dataclasses.replace(s, **{name: value})) == before, name
    for name in ("HOME", "TMPDIR", "CANN_EXPORT_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.chdir(tmp_path)
    assert of(settings(tiny_config())) == before
