"""The proof over ranks on plans of real model classes at every size they allow; broken plans are in test_faults.py."""

from __future__ import annotations

from typing import Any

import pytest

from cann_export.model import build_model
from cann_export.proof import prove_plan, prove_ranks
from cann_export.shard import shard
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.executor.reference.graph import Attr, Edge, Graph, Op, TensorDesc
from tests.tiny_models import tiny_config


def proven(config: dict[str, Any], tp: int) -> dict[str, int]:
    built = build_model(config, "bfloat16", 256)
    names = {name: list(p.shape) for name, p in built.model.named_parameters() if "rotary" not in name}
    proof = prove_plan(shard(built, tp), config["num_key_value_heads"], names)
    assert proof.problems == []
    return proof.summary()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_tensor_of_a_model_is_used_once_over_the_ranks(model_type: str, tp: int) -> None:
    how = proven(tiny_config(model_type), tp)
    assert sum(how.values()) > 20
    if tp == 4:  # two kv heads
        assert any("each piece on 2 ranks on purpose (kv heads)" in text for text in how)
        assert "cut in 4 along dimension 0, padded from 515 to 516" in how


def test_tied_embeddings_are_one_tensor() -> None:
    proven(tiny_config("qwen2", tie_word_embeddings=True), 2)


def test_a_shared_piece_that_is_no_kv_head_is_a_problem() -> None:
    part = Part(source="w", shape=[4, 8], dim=0, ranges=[(0, 2), (0, 2), (2, 4), (2, 4)])
    plan = WeightPlan(tp=4, params={"w": Param(name="w", dtype="bfloat16", shape=[2, 8], parts=[part])})
    assert prove_plan(plan, kv_heads=2).ok
    assert "there are 4 kv heads" in prove_plan(plan, kv_heads=4).problems[0]


def collective(kind: str, group: str, rows: int) -> Graph:
    data = Op("x", "Data", (), (), (), (TensorDesc("y", 27, (rows, 64), {}),), {"index": Attr("i", 0)})
    node = Op("node", kind, (("x", Edge("x", 0)),), (), (), (), {"group": Attr("s", group)})
    return Graph("g", (data, node), {})


@pytest.mark.parametrize(
    "other",
    [("HcomAllGather", "tp", 8), ("HcomAllReduce", "ep", 8), ("HcomAllReduce", "tp", 16)],
)
def test_ranks_must_agree_on_op_group_and_shape(other: tuple[str, str, int]) -> None:
    good = collective("HcomAllReduce", "tp", 8)
    assert prove_ranks({0: good, 1: collective("HcomAllReduce", "tp", 8)}) == []
    (problem,) = prove_ranks({0: good, 1: collective(*other)})
    assert problem.startswith("rank 1: its collective 0 is")
