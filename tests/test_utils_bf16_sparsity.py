"""Which weights moved: definitions by hand, exhaustive bf16 codes, checkpoints in every layout, planted geometry, bad input."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import utils_bf16_sparsity as sparsity
from config import SparsityConfig, UserError, WorkError, parse_config

ROOT = Path(sparsity.__file__).resolve().parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BF16_NAMES = ("seed_formula_bf16", "bf16_bits", "absolute_1e-5")
STORED_NAMES = ("seed_formula_stored", "exact_stored", "absolute_1e-5_stored")


# --------------------------------------------------------------------------------------------------------------------
# Helpers: small models on disk, and a plain reference

def model_weights(seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.bfloat16, untied: bool = False) -> dict:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{k}_proj.weight": (16, 16) for k in "qkvo"} | {f"{prefix}self_attn.q_proj.bias": (16,)}
        shapes |= {f"{prefix}mlp.{k}_proj.weight": (40, 16) for k in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (16, 40), f"{prefix}input_layernorm.weight": (16,)}
    if untied:
        shapes["lm_head.weight"] = (50, 16)
    return {name: (torch.randn(shape, generator=generator) * 0.05).bfloat16().to(dtype) for name, shape in shapes.items()}


def moved_weights(weights: dict, scale: float, dtype: torch.dtype, seed: int = 1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {name: (w.float() + scale * torch.randn(w.shape, generator=generator)).to(dtype) for name, w in weights.items()}


def save_model(folder: Path, weights: dict, shards: list[list[str]] | None = None, config: dict | None = None,
               identity: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if shards is None:
        save_file(weights, folder / "model.safetensors")
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for name, keys in zip(names, shards):
            save_file({k: weights[k] for k in keys}, folder / name)
        index = {"metadata": {}, "weight_map": {k: name for name, keys in zip(names, shards) for k in keys}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "tie_word_embeddings": True} if config is None else config))
    if identity is not None:
        (folder / "rlvr_run.json").write_text(json.dumps(identity))
    return folder


def reference_counts(base: dict, ft: dict, eta: float) -> dict[str, int]:
    """One line per tensor and definition, in float64."""
    def seed_formula(x, y):
        x, y = x.double(), y.double()
        return ((x - y).abs() > eta * torch.maximum(x.abs(), y.abs())).sum().item()
    pairs = [(base[n], ft[n], base[n].bfloat16(), ft[n].bfloat16()) for n in base]
    return {
        "seed_formula_bf16": sum(seed_formula(p, q) for _, _, p, q in pairs),
        "seed_formula_stored": sum(seed_formula(x, y) for x, y, _, _ in pairs),
        "exact_stored": sum((x.double() != y.double()).sum().item() for x, y, _, _ in pairs),
        "bf16_bits": sum((p.view(torch.int16) != q.view(torch.int16)).sum().item() for _, _, p, q in pairs),
        "absolute_1e-5": sum(((p.double() - q.double()).abs() > 1e-5).sum().item() for _, _, p, q in pairs),
        "absolute_1e-5_stored": sum(((x.double() - y.double()).abs() > 1e-5).sum().item() for x, y, _, _ in pairs),
    }


def counts_of(report: dict) -> dict[str, int]:
    return {name: row["num_changed"] for name, row in report["definitions"].items()}


def changed(w, w_new, eta: float = 1e-3, base_dtype=torch.float32, ft_dtype=torch.float32) -> dict[str, int]:
    base, ft = torch.tensor([w], dtype=torch.float64).to(base_dtype), torch.tensor([w_new], dtype=torch.float64).to(ft_dtype)
    return sparsity.measure_block(base, ft, eta).changed


# --------------------------------------------------------------------------------------------------------------------
# One element at a time: the answer is known

ULP_AT_1 = 2.0 ** -7  # bf16: 7 fraction bits


@pytest.mark.parametrize("w, w_new, expected", [
    # w, w', then: seed formula bf16, seed formula stored, exact, bits, absolute (bf16), absolute (stored)
    (1.0, 1.0, (0, 0, 0, 0, 0, 0)),
    (1.0, 1.0 + ULP_AT_1, (1, 1, 1, 1, 1, 1)),
    (1.0, 1.0 + ULP_AT_1 / 4, (0, 1, 1, 0, 0, 1)),        # 0.2 % of w: rounds back to 1 in bf16
    (1.0, 1.0 + 2.0 ** -20, (0, 0, 1, 0, 0, 0)),          # 1e-6 of w: moved as stored, by less than both tolerances
    (1.0, 1.0 + 2.0 ** -11, (0, 0, 1, 0, 0, 1)),          # 0.05 % of w is below eta, yet above 1e-5
    (1.0, 1.0 + ULP_AT_1 / 2, (0, 1, 1, 0, 0, 1)),        # exactly half an ULP ties to even, which is 1
    (1.0 + ULP_AT_1, 1.0 + 1.5 * ULP_AT_1, (1, 1, 1, 1, 1, 1)),  # the tie of an odd code rounds away: 1 + 2 ULP
    (1e-6, 2e-6, (1, 1, 1, 1, 0, 0)),                     # a doubling that the absolute tolerance calls equal
    (1024.0, 1025.0, (0, 0, 1, 0, 0, 1)),                 # ULP is 8: the same code, although 1.0 apart
    (0.0, 1e-30, (1, 1, 1, 1, 0, 0)),
    (0.0, -0.0, (0, 0, 0, 1, 0, 0)),                      # equal values, different bits
    (0.0, 0.0, (0, 0, 0, 0, 0, 0)),
    (0.5, -0.5, (1, 1, 1, 1, 1, 1)),
    (2.0 ** -133, 2.0 ** -132, (1, 1, 1, 1, 0, 0)),       # the two smallest bf16 subnormals
    (2.0 ** -149, 2.0 ** -148, (0, 1, 1, 0, 0, 0)),       # float32 subnormals, both 0 in bf16
    (3.4e38, -3.4e38, (1, 1, 1, 1, 1, 1)),                # finite, infinite in bf16; the difference overflows float32
    (3.4e38, 3.4e38, (1, 0, 0, 1, 1, 0)),                 # equal as stored, not finite in bf16
])
def test_definitions_by_hand(w, w_new, expected):
    names = ("seed_formula_bf16", "seed_formula_stored", "exact_stored", "bf16_bits", "absolute_1e-5", "absolute_1e-5_stored")
    for one, two in ((w, w_new), (-w, -w_new), (w_new, w)):
        if (one, two) == (w_new, w) and w == 1.0 + ULP_AT_1:
            continue
        assert tuple(changed(one, two)[n] for n in names) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
                                    (torch.float16, torch.bfloat16)])
def test_nonfinite_counts_as_changed_and_is_reported(bad, dtypes):
    for pair in ([bad, bad], [bad, 1.0], [1.0, bad]):
        base = torch.tensor([0.5, pair[0], 0.25], dtype=dtypes[0])
        ft = torch.tensor([0.5, pair[1], 0.25], dtype=dtypes[1])
        moved = sparsity.measure_block(base, ft)
        assert set(moved.changed.values()) == {1}
        assert (moved.num_params, moved.nonfinite_either) == (3, 1)
        assert (moved.nonfinite_base, moved.nonfinite_ft) == tuple(int(not math.isfinite(x)) for x in pair)
        # the sums hold the two finite elements only
        assert math.fsum(moved.base_squares) == 0.5 ** 2 + 0.25 ** 2 and moved.max_abs == 0.0


def test_finite_values_that_bf16_cannot_hold_are_counted_apart():
    moved = sparsity.measure_block(torch.tensor([3.4e38, 1.0, 1.0]), torch.tensor([3.4e38, 1.0, 2.0]))
    assert moved.cast_overflow == 1 and moved.nonfinite_either == 0
    assert [moved.changed[n] for n in BF16_NAMES] == [2, 2, 2] and [moved.changed[n] for n in STORED_NAMES] == [1, 1, 1]


def all_finite_bf16() -> torch.Tensor:
    codes = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return codes[torch.isfinite(codes)]


@pytest.mark.parametrize("eta", [1e-3, 2.0 ** -9, 0.0039])
def test_seed_formula_is_bit_equality_on_every_pair_of_neighbouring_bf16_values(eta):
    values = all_finite_bf16().unique()  # sorted; +0 and -0 are one value
    assert len(values) == 65536 - 2 * 128 - 1  # all codes, without those of exponent 255, zero once
    low, high = values[:-1], values[1:]
    for w, w_new in ((low, high), (high, low)):
        moved = sparsity.measure_block(w, w_new, eta)
        assert moved.changed["seed_formula_bf16"] == moved.changed["bf16_bits"] == moved.changed["exact_stored"] == len(low)
    same = sparsity.measure_block(values, values.clone(), eta)
    assert set(same.changed.values()) == {0}


def test_seed_formula_is_not_equality_on_float32():
    counts = changed(1.0, 1.0 + 2.0 ** -20)
    assert counts["exact_stored"] == 1 and counts["seed_formula_stored"] == 0


@pytest.mark.parametrize("eta", [0.0, 1e-3, 0.5, 0.9])
def test_counts_near_the_threshold_are_those_of_float64(eta):
    # differences of eta max(|w|, |w'|) and of 1e-5, give or take a few codes of float32: its arithmetic alone would miscount
    generator = torch.Generator().manual_seed(3)
    w = torch.rand(20000, generator=generator) + 0.5
    w_new = torch.cat([w[:10000] / (1 - eta), w[10000:] * 1e-5 + 1e-5])
    w = torch.cat([w[:10000], w[10000:] * 1e-5])
    w_new = (w_new.view(torch.int32) + torch.randint(-3, 4, w.shape, generator=generator, dtype=torch.int32)).view(torch.float32)
    counts = sparsity.measure_block(w, w_new, eta).changed
    assert counts == reference_counts({"w": w}, {"w": w_new}, eta)
    if eta:
        assert 0.1 < counts["seed_formula_stored"] / 20000 < 0.9  # the test would prove nothing were all on one side


@pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-30, 1e-22, 1e-12, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("base_dtype, ft_dtype", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_counts_and_sums_hold_over_the_whole_range_of_magnitudes(scale, base_dtype, ft_dtype):
    generator = torch.Generator().manual_seed(4)
    w = (torch.randn(3000, generator=generator, dtype=torch.float64) * scale).to(DTYPES[base_dtype])
    w_new = (w.double() * (1 + 0.01 * torch.randn(3000, generator=generator, dtype=torch.float64))).to(DTYPES[ft_dtype])
    moved = sparsity.measure_block(w, w_new)
    assert moved.changed == reference_counts({"w": w}, {"w": w_new}, 1e-3)
    delta = (w_new.double() - w.double()).abs()
    # float32 sums of 3000 terms, added pairwise: relative error below 12 x 2^-24
    assert math.fsum(moved.sum_abs) == pytest.approx(float(delta.sum()), rel=1e-6, abs=0)
    assert math.fsum(moved.squares) == pytest.approx(float((delta ** 2).sum()), rel=1e-6, abs=0)
    assert math.fsum(moved.base_squares) == pytest.approx(float((w.double() ** 2).sum()), rel=1e-6, abs=0)
    assert moved.max_abs == pytest.approx(float(delta.max()), rel=2.0 ** -23, abs=0)


def test_ulp_histogram_by_hand():
    ulp = 2.0 ** -7
    w = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 0.0, 1.0])
    w_new = w + torch.tensor([ulp, ulp / 2, ulp / 4 + ulp / 8, 3 * ulp, 2 * ulp, 2.0 ** -133, 0.0])
    # |dw| / ULP(w): 1, 0.5, 0.375, 3, 1 (ULP is twice as large at 3), 1 (subnormal grid at 0), and one equal
    block = sparsity.histogram_blocks(sparsity.measure_block(w, w_new))["ulp_histogram"]
    found = {edge: c for edge, c in zip(block["bin_lower_edges"], block["counts"]) if c}
    assert found == {0.25: 1, 0.5: 1, 1.0: 3, 2.0: 1} and block["num_equal"] == 1
    assert block["num_moved_below_half_ulp"] == 1 and block["median_of_moved_between"] == [1.0, 2.0]


@pytest.mark.parametrize("share", [0.01, 0.4, 1.0])  # sparse blocks are compressed, dense ones are not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_histograms_match_a_float64_reference(share, dtype):
    generator = torch.Generator().manual_seed(5)
    w = (torch.randn(50000, generator=generator) * 0.02).bfloat16()
    step = torch.randn(50000, generator=generator) * 10 ** (-4 * torch.rand(50000, generator=generator) - 3)
    w_new = torch.where(torch.rand(50000, generator=generator) < share, w.float() + step, w.float()).to(dtype)
    x, y = w.double().numpy(), w_new.double().numpy()
    x, y = x[x != y], y[x != y]
    ulp = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(x))), -126) - 7)
    blocks = sparsity.histogram_blocks(sparsity.measure_block(w, w_new))
    for key, values in (("ulp_histogram", np.abs(y - x) / ulp), ("relative_histogram", np.abs(y - x) / np.maximum(abs(x), abs(y)))):
        edges = blocks[key]["bin_lower_edges"] + [np.inf]
        assert blocks[key]["counts"] == np.histogram(values, edges)[0].tolist()
        assert blocks[key]["num_equal"] == 50000 - len(x)


def test_rounding_to_bf16_keeps_subnormals_and_ties_to_even():
    # every float32 code near every bf16 code of small magnitude, by integer arithmetic instead of the library's cast
    codes = (torch.arange(0, 1 << 16, 7, dtype=torch.int32) << 16)[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    codes = codes[(codes & 0x7F800000) != 0x7F800000].flatten().to(torch.int32)
    expected = ((codes + 0x7FFF + ((codes >> 16) & 1)) >> 16).to(torch.int16)
    assert torch.equal(codes.view(torch.float32).to(torch.bfloat16).view(torch.int16), expected)


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints in every layout

@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("ft_dtype", DTYPES)
@pytest.mark.parametrize("eta", [1e-3, 0.05])
def test_agrees_with_a_plain_reference_on_sharded_checkpoints(tmp_path, base_dtype, ft_dtype, eta):
    base = model_weights(dtype=DTYPES[base_dtype])
    ft = moved_weights(base, 1e-4, DTYPES[ft_dtype])
    names = sorted(base)
    save_model(tmp_path / "base", base, shards=[names[::2], names[1::2]])
    save_model(tmp_path / "ft", ft, shards=[names[10:], names[:3], names[3:10]])
    report = sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft", eta)
    assert counts_of(report) == reference_counts(base, ft, eta)
    total = sum(w.numel() for w in base.values())
    assert report["sparsity"] == {"sparsity_percent": 100 * (1 - report["sparsity"]["num_changed"] / total), "eta": eta,
                                  "num_changed": report["definitions"]["seed_formula_bf16"]["num_changed"], "num_params": total}
    for block in ("by_layer", "by_module_kind", "by_layer_and_kind", "tensors"):
        assert sum(row["num_params"] for row in report[block].values()) == total
    for name, row in report["tensors"].items():
        assert row["num_changed"] == reference_counts({name: base[name]}, {name: ft[name]}, eta)
        assert row["delta"]["norm"] == pytest.approx(float((ft[name].double() - base[name].double()).norm()), rel=1e-5)
    layer_1 = {n: base[n] for n in base if ".layers.1." in n}
    assert report["by_layer"]["1"]["definitions"]["exact_stored"]["num_changed"] == reference_counts(layer_1, ft, eta)["exact_stored"]
    kinds = {k: row["num_params"] for k, row in report["by_module_kind"].items()}
    assert kinds == {"q": 2 * (256 + 16), "k": 512, "v": 512, "o": 512, "gate": 1280, "up": 1280, "down": 1280, "norm": 48,
                     "embedding": 800}


def test_chunks_threads_and_shard_order_change_no_number(tmp_path):
    generator = torch.Generator().manual_seed(6)
    base = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(400, 700, generator=generator).bfloat16() for i in range(2)}
    base["model.layers.0.mlp.up_proj.bias"] = torch.randn(3, generator=generator).bfloat16()  # shifts what is stored behind it
    base["model.norm.weight"] = torch.randn(sparsity.CUDA_BLOCK_ELEMENTS + 1, generator=generator).bfloat16()  # one over a whole block
    ft = moved_weights(base, 1e-2, torch.float32)
    names = sorted(base)
    one = save_model(tmp_path / "base", base), save_model(tmp_path / "ft", ft)
    two = (save_model(tmp_path / "base2", base, shards=[names[1:], names[:1]]),
           save_model(tmp_path / "ft2", ft, shards=[names[2:], [names[0]], [names[1]]]))
    assert counts_of(sparsity.compare_checkpoints(*one, chunk_bytes=1)) == reference_counts(base, ft, 1e-3)
    reports = [sparsity.compare_checkpoints(*one), sparsity.compare_checkpoints(*one, num_threads=1, chunk_bytes=1),
               sparsity.compare_checkpoints(*one, num_threads=3, chunk_bytes=9_000_000), sparsity.compare_checkpoints(*two)]
    for report in reports:
        for key in ("run_cost", "base_ckpt", "ft_ckpt"):
            report.pop(key)
    assert all(report == reports[0] for report in reports[1:])


def test_run_identity_and_config_are_carried_over(tmp_path):
    base = model_weights()
    save_model(tmp_path / "base", base)
    identity = {"arm": "bf16", "seed": 3, "replicate": 1, "config_hash": "abcd"}
    save_model(tmp_path / "ft", base, identity=identity)
    report = sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft")
    assert {k: report[k] for k in identity} == identity
    assert report["sparsity"]["sparsity_percent"] == 100.0 and set(counts_of(report).values()) == {0}


@pytest.mark.parametrize("where", ["neither", "base", "ft", "both"])
@pytest.mark.parametrize("said", [True, None])
def test_tied_head_counts_once(tmp_path, where, said):
    base = model_weights()
    ft = moved_weights(base, 0.01, torch.float32)
    config = {"model_type": "qwen2"} | ({} if said is None else {"tie_word_embeddings": said})
    for name, weights in (("base", base), ("ft", ft)):
        copy = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()} if where in (name, "both") else {}
        save_model(tmp_path / name, weights | copy, config=config)
    report = sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft")
    assert report["sparsity"]["num_params"] == sum(w.numel() for w in base.values())
    assert counts_of(report) == reference_counts(base, ft, 1e-3)
    assert (report["tied"] is not None) == (where != "neither")


def test_untied_head_is_counted_even_if_it_equals_the_embedding(tmp_path):
    base = model_weights(untied=True)
    base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
    for name in ("base", "ft"):
        save_model(tmp_path / name, base, config={"model_type": "qwen2", "tie_word_embeddings": False})
    report = sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft")
    assert report["tied"] is None and report["by_module_kind"]["head"]["num_params"] == 800


def test_optimizer_file_and_buffers_are_left_out(tmp_path):
    base = model_weights()
    save_model(tmp_path / "base", base | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    save_model(tmp_path / "ft", base | {"counter": torch.tensor([3])})
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / "ft" / "optimizer.safetensors")
    report = sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft")
    assert report["sparsity"]["num_params"] == sum(w.numel() for w in base.values())
    assert report["skipped_not_parameters"] == ["counter", "model.layers.0.self_attn.rotary_emb.inv_freq"]


@pytest.mark.parametrize("name, kind, layer", [
    ("model.layers.11.self_attn.q_proj.weight", "q", 11), ("model.layers.0.self_attn.k_norm.weight", "norm", 0),
    ("model.layers.3.mlp.experts.7.down_proj.weight", "down", 3), ("model.layers.2.post_attention_layernorm.weight", "norm", 2),
    ("model.embed_tokens.weight", "embedding", None), ("lm_head.weight", "head", None), ("model.norm.weight", "norm", None),
    ("transformer.h.4.attn.c_attn.weight", "other", 4), ("transformer.wte.weight", "embedding", None),
    ("model.layers.5.self_attn.v_proj.bias", "v", 5), ("model.layers.1.mlp.gate.weight", "other", 1)])
def test_names_tell_module_kind_and_layer(name, kind, layer):
    assert (sparsity.module_kind(name), sparsity.layer_index(name)) == (kind, layer)


# --------------------------------------------------------------------------------------------------------------------
# Geometry

def orthonormal(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64)).Q


def planted(angles: list[float], values: list[float], rows: int = 60, columns: int = 40, tail: float = 0.0, new_values=None):
    """Two matrices whose leading left subspaces differ by ``angles`` and right subspaces by half of them."""
    k = len(angles)
    left, right = orthonormal(rows, rows, 1), orthonormal(columns, columns, 2)
    rest = min(rows, columns) - 2 * k
    theta = torch.tensor(angles, dtype=torch.float64)
    def matrix(turn, s):
        cos, sin = torch.cos(turn * theta), torch.sin(turn * theta)
        u = left[:, :k] * cos + left[:, k:2 * k] * sin
        v = right[:, :k] * torch.cos(turn * theta / 2) + right[:, k:2 * k] * torch.sin(turn * theta / 2)
        noise = left[:, 2 * k:2 * k + rest] * (tail * torch.linspace(1, 0.5, rest, dtype=torch.float64)) @ right[:, 2 * k:2 * k + rest].mT
        return (u * torch.tensor(s, dtype=torch.float64)) @ v.mT + noise
    return matrix(0.0, values), matrix(1.0, values if new_values is None else new_values)


@pytest.mark.parametrize("angles", [[1e-5, 1e-3, 0.02], [0.3, 0.7, 1.2], [0.0, 1e-7, 1.5]])
def test_planted_rotation_and_spectrum_are_recovered_exactly(angles):
    old, new = [5.0, 4.0, 3.0], [5.5, 4.1, 2.5]
    w, w_new = planted(angles, old, tail=0.1, new_values=new)
    found = sparsity.matrix_geometry(w, w_new, rank=3)
    assert found["method"] == "exact" and found["rank"] == 3
    # the claim of the tool: 1e-6 radians; sines keep small angles accurate
    assert found["left_angles_deg"] == pytest.approx(np.rad2deg(sorted(angles)), abs=np.rad2deg(1e-6), rel=0)
    assert found["right_angles_deg"] == pytest.approx(np.rad2deg(sorted(angles)) / 2, abs=np.rad2deg(1e-6), rel=0)
    assert found["max_left_angle_deg"] == found["left_angles_deg"][-1]
    shift = np.linalg.norm(np.subtract(new, old)) / np.linalg.norm(w.numpy())
    assert found["spectral_shift"] == pytest.approx(shift, abs=1e-6)
    assert found["spectral_shift_top_k"] == pytest.approx(np.linalg.norm(np.subtract(new, old)) / np.linalg.norm(old), abs=1e-6)
    assert found["spectral_shift"] <= found["spectral_shift_at_most"]


def test_wedin_bound_holds_and_update_ranks_are_right():
    w, w_new = planted([0.01, 0.02, 0.03], [5.0, 4.0, 3.0], tail=0.1)
    found = sparsity.matrix_geometry(w, w_new, rank=3)
    assert math.sin(math.radians(found["max_left_angle_deg"])) <= found["wedin_sine_at_most"] < 1
    direction = orthonormal(60, 4, 8), orthonormal(40, 4, 9)
    update = (direction[0] * torch.tensor([2.0, 2.0, 2.0, 2.0], dtype=torch.float64)) @ direction[1].mT
    found = sparsity.matrix_geometry(w, w + update, rank=3)
    assert found["update_effective_rank"] == pytest.approx(4.0, abs=1e-6)  # four equal singular values
    assert found["update_stable_rank"] == pytest.approx(4.0, abs=1e-6)
    assert found["update_numerical_rank_share"] == pytest.approx(4 / 40)


@pytest.mark.parametrize("tail", [0.01, 1.0, 2.0])
def test_randomised_decomposition_stays_within_its_stated_bound(tail):
    # tail 2.0 against a smallest planted value of 3.0: the hard case, a gap of a third
    w, w_new = planted([0.02, 0.3, 0.9], [5.0, 4.0, 3.0], rows=300, columns=220, tail=tail, new_values=[5.2, 4.0, 3.1])
    exact = sparsity.matrix_geometry(w, w_new, rank=3)
    found = sparsity.matrix_geometry(w, w_new, rank=3, exact_max_dim=0)
    assert found["method"] == "randomised" and found["spectral_shift"] is None and "exact_svd_max_dim" in found["spectral_shift_reason"]
    assert 0 < found["angle_sine_error"] < 0.5
    for side in ("left", "right"):
        gaps = np.abs(np.sin(np.deg2rad(found[f"{side}_angles_deg"])) - np.sin(np.deg2rad(exact[f"{side}_angles_deg"])))
        assert gaps.max() <= found["angle_sine_error"]
    assert abs(found["spectral_shift_top_k"] - exact["spectral_shift_top_k"]) <= found["spectral_shift_top_k_error"]
    assert found["update_norm_2"] == pytest.approx(exact["update_norm_2"], rel=0.02)


def test_randomised_decomposition_admits_that_a_flat_spectrum_has_no_subspace():
    generator = torch.Generator().manual_seed(7)
    w = torch.randn(200, 200, generator=generator)
    found = sparsity.matrix_geometry(w, w + 0.01, rank=20, exact_max_dim=0)
    assert found["angle_sine_error"] is None and "gap" in found["angle_sine_error_reason"]


def test_default_rank_sits_at_the_gap_of_the_spectrum():
    values = torch.tensor([10.0] * 9 + [1.0] * 60, dtype=torch.float64)
    # half the energy is held by 5 values of 10 (500 of 960); the gap at 9 lies beyond a quarter, so the widest gap near 5 is a tie
    assert sparsity.principal_rank(values, float((values ** 2).sum())) in (4, 5, 6)
    values = torch.cat([torch.full((16,), 10.0), torch.full((100,), 3.0)]).double()
    assert sparsity.principal_rank(values, float((values ** 2).sum())) == 16  # 1250 of 2500 are held by 13; 16 is within a quarter


def test_random_masks_sit_at_chance():
    generator = torch.Generator().manual_seed(8)
    w = torch.randn(300, 200, generator=generator) * 0.02
    move = torch.rand(300, 200, generator=generator) < 0.1
    found = sparsity.matrix_geometry(w, torch.where(move, w * 1.02, w), rank=20)
    for key in ("principal_mask", "low_magnitude_mask"):
        assert abs(found[key]["z"]) < 4 and found[key]["chance"] == pytest.approx(0.5, abs=0.001)
    for key in ("rows", "columns"):
        # Gini of 300 (200) binomial counts: its own sampling error is about 5 % (1 / sqrt(2 r)); the normal form adds under 1 %
        assert found[key]["gini"] == pytest.approx(found[key]["gini_chance"], rel=0.2)
        assert found[key]["top_tenth"] == pytest.approx(found[key]["top_tenth_chance"], rel=0.05)


def test_largest_share_by_hand_with_ties_in():
    assert sparsity.largest_share(torch.arange(10.0), 0.3).tolist() == [False] * 7 + [True] * 3
    assert sparsity.largest_share(torch.tensor([1.0, 2.0, 2.0, 2.0]), 0.25).tolist() == [False, True, True, True]


def test_masks_find_planted_updates():
    generator = torch.Generator().manual_seed(9)
    w = torch.randn(100, 80, generator=generator) * 0.02
    low = sparsity.matrix_geometry(w, torch.where(w.abs() <= w.abs().median(), w * 1.1, w), rank=10)
    assert low["low_magnitude_mask"]["overlap"] == 1.0 and low["principal_mask"]["overlap"] < 0.5
    stripe = w.clone()
    stripe[:5] *= 1.1
    rows = sparsity.matrix_geometry(w, stripe, rank=10)
    assert rows["rows"]["gini"] == pytest.approx(0.95) and rows["rows"]["top_tenth"] == 1.0  # 5 of 100 rows hold everything
    assert rows["columns"]["gini"] == 0.0
    still = sparsity.matrix_geometry(w, w.clone(), rank=10)
    assert still["principal_mask"]["overlap"] is None and "changed" in still["principal_mask"]["reason"]
    assert still["spectral_shift"] == 0.0 and still["max_left_angle_deg"] < 1e-6


def test_update_mask_agrees_with_the_counts():
    generator = torch.Generator().manual_seed(10)
    w = torch.randn(5000, generator=generator)
    w_new = w + 1e-3 * torch.randn(5000, generator=generator)
    w_new[7] = math.nan
    assert int(sparsity.changed_mask(w, w_new).sum()) == sparsity.measure_block(w, w_new).changed["seed_formula_bf16"]


# --------------------------------------------------------------------------------------------------------------------
# Several runs, and one over time

def test_mask_overlap_of_runs_by_hand_and_at_chance(tmp_path):
    generator = torch.Generator().manual_seed(11)
    base = {"model.layers.0.mlp.up_proj.weight": torch.rand(300, 400, generator=generator) + 1, "model.norm.weight": torch.ones(4)}
    masks = [torch.rand(300, 400, generator=generator) < p for p in (0.2, 0.5, 0.1)]
    masks[2] |= masks[0]  # run 2 changed all that run 0 did
    folders = [save_model(tmp_path / "base", base)]
    for i, mask in enumerate(masks):
        up = base["model.layers.0.mlp.up_proj.weight"]
        folders.append(save_model(tmp_path / f"run{i}", base | {"model.layers.0.mlp.up_proj.weight": torch.where(mask, up * 1.1, up)}))
    report = sparsity.compare_runs(folders[0], folders[1:], chunk_bytes=1)
    block = report["by_module_kind"]["up"]
    for i in range(3):
        for j in range(3):
            both, either = (masks[i] & masks[j]).sum().item(), (masks[i] | masks[j]).sum().item()
            assert block["jaccard"][i][j] == both / either
            assert block["overlap_of_row"][i][j] == both / masks[i].sum().item()
    assert block["overlap_of_row"][0][2] == 1.0
    # runs 0 and 1 are independent: chance pq / (p + q - pq) = 0.1 / 0.6; one standard error of the overlap is 0.0015
    assert block["jaccard"][0][1] == pytest.approx(block["jaccard_chance"][0][1], abs=0.006)
    assert block["jaccard_chance"][0][1] == pytest.approx(0.1 / 0.6, abs=0.01)
    together = sum(m.int() for m in masks)
    assert block["consensus"]["num_changed_by"] == [int((together == i).sum()) for i in range(4)]
    assert sum(block["consensus"]["num_changed_by_chance"]) == pytest.approx(300 * 400)
    norm = report["by_module_kind"]["norm"]
    assert norm["mean_jaccard"] is None and norm["reason"] and norm["jaccard"][0][1] is None


def test_trajectory_orders_steps_and_ends_at_the_final_model(tmp_path):
    base = model_weights()
    save_model(tmp_path / "base", base)
    weights = base
    for step in (2, 10, 100):
        weights = moved_weights(weights, 1e-3, torch.float32, seed=step)
        save_model(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", weights)
    save_model(tmp_path / "run" / "final_model", weights, identity={"arm": "fp32", "seed": 1})
    points = sparsity.trajectory(tmp_path / "base", tmp_path / "run")["points"]
    assert [(p["name"], p["step"]) for p in points] == [("step_000002", 2), ("step_000010", 10), ("step_000100", 100),
                                                         ("final_model", None)]
    assert counts_of(points[2]) == counts_of(points[3]) == reference_counts(base, weights, 1e-3)
    assert points[0]["vs_previous"]["definitions"] == points[0]["definitions"]
    assert points[3]["vs_previous"]["definitions"]["bf16_bits"]["num_changed"] == 0
    with pytest.raises(UserError, match="holds neither"):
        sparsity.trajectory(tmp_path / "base", tmp_path / "base")


# --------------------------------------------------------------------------------------------------------------------
# Bad input: one line that names the thing

def pair(tmp_path: Path) -> tuple[Path, Path, dict]:
    base = model_weights()
    return save_model(tmp_path / "base", base), save_model(tmp_path / "ft", moved_weights(base, 1e-3, torch.float32)), base


def test_missing_and_misshapen_tensors_are_named_or_counted(tmp_path):
    base_dir, ft_dir, base = pair(tmp_path)
    ft = moved_weights(base, 1e-3, torch.float32)
    ft["model.norm.weight"] = torch.ones(17)
    lost = ft.pop("model.layers.1.mlp.up_proj.weight")
    save_model(ft_dir, ft)
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight.*--allow_missing"):
        sparsity.compare_checkpoints(base_dir, ft_dir)
    save_model(ft_dir, ft | {"model.layers.1.mlp.up_proj.weight": lost})
    with pytest.raises(UserError, match=r"model\.norm\.weight is \[16\].*\[17\]"):
        sparsity.compare_checkpoints(base_dir, ft_dir)
    save_model(ft_dir, ft)
    report = sparsity.compare_checkpoints(base_dir, ft_dir, allow_missing=True)
    assert report["missing"] == {"only_in_base": ["model.layers.1.mlp.up_proj.weight"], "only_in_ft": [],
                                 "different_shape": {"model.norm.weight": [[16], [17]]},
                                 "num_base_params_not_compared": 640 + 16, "num_ft_params_not_compared": 17}
    assert report["sparsity"]["num_params"] == sum(w.numel() for w in base.values()) - 656


def test_different_architectures_are_refused(tmp_path):
    base_dir, ft_dir, base = pair(tmp_path)
    save_model(ft_dir, base, config={"model_type": "llama"})
    with pytest.raises(UserError, match="qwen2.*llama"):
        sparsity.compare_checkpoints(base_dir, ft_dir)
    save_model(ft_dir, {"transformer.h.0.attn.c_attn.weight": torch.ones(2, 2)}, config={})
    with pytest.raises(UserError, match=r"no parameter in common.*transformer\.h\.0"):
        sparsity.compare_checkpoints(base_dir, ft_dir)


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "header"])
def test_damaged_shard_is_named(tmp_path, damage):
    base = model_weights()
    names = sorted(base)
    base_dir = save_model(tmp_path / "base", base, shards=[names[:9], names[9:]])
    ft_dir = save_model(tmp_path / "ft", base)
    shard = base_dir / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes({"truncated": content[:-10], "empty": b"", "garbage": b"\xff" * 400, "header": content[:8] + b"}" + content[9:]}[damage])
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors.*truncated or corrupt"):
        sparsity.compare_checkpoints(base_dir, ft_dir)
    shard.unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors is missing"):
        sparsity.compare_checkpoints(base_dir, ft_dir)


def test_index_that_names_an_absent_tensor_is_refused(tmp_path):
    base = model_weights()
    folder = save_model(tmp_path / "base", base, shards=[sorted(base)])
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.layers.9.extra.weight"] = "model-00001-of-00001.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"does not hold model\.layers\.9\.extra\.weight"):
        sparsity.open_checkpoint(str(folder))


def test_index_decides_which_of_two_copies_is_the_model(tmp_path):
    base = model_weights()
    names = sorted(base)
    save_model(tmp_path / "base", base, shards=[names[:9], names[9:]])
    save_file({n: base[n] for n in names[9:]} | {names[0]: base[names[0]] + 1}, tmp_path / "base" / "model-00002-of-00002.safetensors")
    save_model(tmp_path / "ft", base)
    assert set(counts_of(sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft")).values()) == {0}
    (tmp_path / "base" / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="is in both"):
        sparsity.compare_checkpoints(tmp_path / "base", tmp_path / "ft")


def test_other_kinds_of_folder_are_refused_with_the_reason(tmp_path):
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: pickle checkpoints are refused"):
        sparsity.open_checkpoint(str(tmp_path / "pickle"))
    with pytest.raises(UserError, match="not a safetensors file; pickle"):
        sparsity.open_checkpoint(str(tmp_path / "pickle" / "pytorch_model.bin"))
    (tmp_path / "lora").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="LoRA"):
        sparsity.open_checkpoint(str(tmp_path / "lora"))
    save_model(tmp_path / "run" / "final_model", model_weights())
    with pytest.raises(UserError, match="did you mean .*final_model"):
        sparsity.open_checkpoint(str(tmp_path / "run"))
    save_model(tmp_path / "int", {"w": torch.ones(3, dtype=torch.float64)})
    with pytest.raises(UserError, match="w is stored as F64"):
        sparsity.open_checkpoint(str(tmp_path / "int"))


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "results/train_logs/bf16_seed1/final_model", "absent", "tests/absent"])
def test_missing_local_path_is_a_request_error(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"--ft_ckpt .*absent|--ft_ckpt results.*no such folder"):
        sparsity.open_checkpoint(name, "--ft_ckpt")


def test_hub_id_that_cannot_be_downloaded_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(WorkError, match="no-such-owner/no-such-model.*could not be downloaded") as caught:
        sparsity.open_checkpoint("no-such-owner/no-such-model", "--base_ckpt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags, message", [
    (["--ft_ckpt", "F"], "--base_ckpt is required"), (["--base_ckpt", "B"], "--output_path is required"),
    (["--base_ckpt", "B", "--output_path", "O.json"], "nothing to compare"),
    (["--base_ckpt", "B", "--output_path", "O.json", "--compare", "F", "G", "--geometry"], "--geometry needs --ft_ckpt"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--chunk_mib", "0"], "--chunk_mib"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--eta", "-1"], "--eta"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--eta", "1.5"], "--eta"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--geometry", "--alpha", "1"], "--alpha"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--geometry", "--rank", "-2"], "--rank"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--geometry", "--layers", "1", "7"], "--layers 7"),
    (["--base_ckpt", "B", "--compare", "F", "--output_path", "O.json"], "--compare needs two"),
    (["--base_ckpt", "B", "--trajectory", "absent", "--output_path", "O.json"], "--trajectory absent"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--etaa", "1"], "did you mean --eta"),
    (["--base_ckpt", "B", "--ft_ckpt", "F", "--output_path", "O.json", "--plots", "B/model.safetensors/x"], "not writable"),
])
def test_wrong_request_is_named_and_writes_nothing(tmp_path, monkeypatch, flags, message):
    base = model_weights()
    for name in ("B", "F", "G"):
        save_model(tmp_path / name, base)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        sparsity.main(parse_config(SparsityConfig, flags))
    assert not (tmp_path / "O.json").exists()


def test_cuda_without_a_gpu_is_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    base_dir, ft_dir, _ = pair(tmp_path)
    with pytest.raises(UserError, match="--device cuda"):
        sparsity.compare_checkpoints(base_dir, ft_dir, device="cuda")


@pytest.mark.gpu
def test_cuda_counts_equal_cpu_counts(tmp_path):
    base_dir, ft_dir, _ = pair(tmp_path)
    assert counts_of(sparsity.compare_checkpoints(base_dir, ft_dir, device="cuda")) == counts_of(sparsity.compare_checkpoints(base_dir, ft_dir))


# --------------------------------------------------------------------------------------------------------------------
# The command itself

def run_command(*flags: object, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(ROOT / "utils_bf16_sparsity.py"), *map(str, flags)], capture_output=True, text=True,
                          timeout=300, env=environment, **options)


def test_command_writes_json_and_every_plot(tmp_path):
    base_dir, ft_dir, base = pair(tmp_path)
    save_model(tmp_path / "run" / "checkpoints" / "step_000004", moved_weights(base, 5e-4, torch.float32))
    save_model(tmp_path / "run" / "final_model", moved_weights(base, 1e-3, torch.float32))
    done = run_command("--base_ckpt", base_dir, "--ft_ckpt", ft_dir, "--output_path", tmp_path / "new" / "bf16_seed1_sparsity.json",
                       "--geometry", "--plots", tmp_path / "plots", "--compare", ft_dir, tmp_path / "run" / "checkpoints" / "step_000004",
                       "--trajectory", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "new" / "bf16_seed1_sparsity.json").read_text(), parse_constant=lambda c: pytest.fail(c))
    assert set(report["sparsity"]) == {"sparsity_percent", "num_changed", "num_params", "eta"}
    assert counts_of(report) == reference_counts(base, moved_weights(base, 1e-3, torch.float32), 1e-3)
    assert len(report["geometry"]["matrices"]) == 15 and "tensors" in report and "transformers" not in done.stderr
    plots = {p.name: p.stat().st_size for p in (tmp_path / "plots").iterdir()}
    assert set(plots) == {f"{n}.png" for n in ("sparsity_by_layer", "ulp_histogram", "principal_angles", "mask_overlap", "mask_jaccard",
                                               "sparsity_vs_step")}
    assert min(plots.values()) > 5000  # an empty set of axes is smaller
    assert f"{report['sparsity']['sparsity_percent']:.4f} %" in done.stdout


def test_command_reports_a_bad_request_in_one_line_with_code_2(tmp_path):
    base_dir, _, _ = pair(tmp_path)
    done = run_command("--base_ckpt", base_dir, "--ft_ckpt", tmp_path / "absent", "--output_path", tmp_path / "out" / "x.json")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "absent: no such folder" in done.stderr
    assert not (tmp_path / "out" / "x.json").exists()


def test_full_disk_leaves_no_half_plot_and_names_it(tmp_path):
    resource = pytest.importorskip("resource")
    base_dir, ft_dir, _ = pair(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(sparsity.compare_checkpoints(base_dir, ft_dir)))
    code = ("import json; from config import WorkError; import utils_bf16_sparsity as s\n"
            "try: s.write_plots(json.load(open('report.json')), 'plots')\n"
            "except WorkError as error: print(error)")
    # a limit of 4 KiB on file size stands in for a full disk (EFBIG instead of ENOSPC); font caches are not to be written either
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
    assert done.stdout.startswith("plot plots/sparsity_by_layer.png cannot be written: File too large"), done.stderr
    assert list((tmp_path / "plots").iterdir()) == []


def test_module_import_brings_in_neither_torch_nor_transformers():
    code = "import sys, utils_bf16_sparsity; print([m for m in ('torch', 'transformers', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


# --------------------------------------------------------------------------------------------------------------------
# Speed and memory at 2.5 GB an end (slow: needs 5.5 GB of disk and as much page cache)

MEASURE = """
import json, os, sys, threading, time
import utils_bf16_sparsity as s
base, ft, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = [os.path.join(d, f) for d in (base, ft) for f in sorted(os.listdir(d)) if f.endswith('.safetensors')]
buffer, peak, done = bytearray(16 << 20), 0, False

def plain_read():
    started, total = time.perf_counter(), 0
    for file in files:
        with open(file, 'rb', buffering=0) as handle:
            while count := handle.readinto(buffer):
                total += count
    return total / 1e9 / (time.perf_counter() - started)

def watch():
    global peak
    while not done:
        anonymous = next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('RssAnon'))
        peak = max(peak, anonymous)
        time.sleep(0.02)

plain_read()                      # fills the page cache
rates = [plain_read()]
watcher = threading.Thread(target=watch)
watcher.start()
cpu = time.process_time()
report = s.compare_checkpoints(base, ft, num_threads=threads)
cpu, done = time.process_time() - cpu, True
watcher.join()
rates.append(plain_read())
print(json.dumps({'rate': report['run_cost']['gigabytes_per_second'], 'seconds': report['run_cost']['seconds'],
                  'cpu_seconds': cpu, 'plain_read': max(rates), 'peak_anonymous': peak, 'load': os.getloadavg()[0],
                  'bytes': report['run_cost']['bytes_compared'], 'sparsity': report['sparsity']['sparsity_percent']}))
"""


def write_large_pair(folder: Path, share_changed: float, layers: int = 28) -> tuple[Path, Path]:
    """Two checkpoints of 1.25e9 bf16 weights (a 1.5B model's shapes), in five shards; weights are slices of one random pool."""
    generator = torch.Generator().manual_seed(12)
    pool = (torch.randn(1 << 26, generator=generator) * 0.03).bfloat16()
    moved = torch.where(torch.rand(1 << 26, generator=generator) < share_changed, pool.float() * (1 + 1 / 64), pool.float()).bfloat16()
    shapes = {"q_proj": (1536, 1536), "k_proj": (256, 1536), "v_proj": (256, 1536), "o_proj": (1536, 1536)}
    mlp = {"gate_proj": (8192, 1536), "up_proj": (8192, 1536), "down_proj": (1536, 8192)}
    for name, source in (("base", pool), ("ft", moved)):
        (folder / name).mkdir()
        weight_map = {}
        for shard in range(5):
            file = f"model-{shard + 1:05d}-of-00005.safetensors"
            tensors, start = {}, 977 * shard
            for layer in range(layers * shard // 5, layers * (shard + 1) // 5):
                for module, (rows, columns) in ({f"self_attn.{k}": v for k, v in shapes.items()} | {f"mlp.{k}": v for k, v in mlp.items()}).items():
                    start = (start + 12_345_677) % ((1 << 26) - rows * columns)
                    key = f"model.layers.{layer}.{module}.weight"
                    tensors[key] = source[start:start + rows * columns].view(rows, columns).clone()
                    weight_map[key] = file
            save_file(tensors, folder / name / file)
        (folder / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "base", folder / "ft"


@pytest.mark.slow
@pytest.mark.parametrize("share_changed", [0.02, 0.5])  # about what bf16 masters, and float32 masters read in bf16, leave
def test_a_pair_of_2_5_gb_is_read_at_1_gb_a_second_in_less_than_1_gb(tmp_path, share_changed):
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status to tell anonymous memory from mapped pages")
    base_dir, ft_dir = write_large_pair(tmp_path, share_changed)
    done = subprocess.run([sys.executable, "-c", MEASURE, base_dir, ft_dir, "2"], capture_output=True, text=True, timeout=900, cwd=ROOT)
    for folder in (base_dir, ft_dir):
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["bytes"] > 4.8e9 and measured["sparsity"] == pytest.approx(100 * (1 - share_changed), abs=1)
    assert measured["peak_anonymous"] < 1e9
    if measured["load"] > 2.5:
        pytest.skip(f"machine busy (load {measured['load']:.1f}), the rate says nothing: {measured}")
    assert measured["rate"] > 1.0, measured
