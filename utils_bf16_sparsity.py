"""Which weights moved between two checkpoints, as bf16 sees it and as they are stored.

In:   two checkpoint folders (or hub ids) with safetensors weights; several in the modes --compare and --trajectory.
Out:  one strict JSON file: `sparsity` (the seed formula on both ends cast to bf16), five `definitions` of "changed", counts per
      tensor, layer and module kind, histograms of |dw| in bf16 ULPs and relative to the weight; with --geometry the measures of
      the Three-Gate paper (spectral shift, subspace rotation, mask overlaps); with --plots the figures.

CPU smoke run:  python utils_bf16_sparsity.py --base_ckpt data/tiny_base --ft_ckpt RUN/final_model --output_path out.json
A 7B pair:      the same call on two 15 GB folders; reads each once, see README for the measured rate.

"Changed" is always "not provably unchanged": an element with a NaN or an infinity at either end counts as changed under every
definition, and is counted apart in `nonfinite`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import SparsityConfig, UserError, WorkError
from utils_run import package_versions, read_json, require_writable_dir, run_script, write_json

if TYPE_CHECKING:  # torch is imported where it is used, so that --help is instant
    import numpy as np
    import torch

DEFAULT_ETA = 1e-3         # relative; any value below 2^-8 makes the seed formula equal to bit equality on bf16 values
BF16_MIN_RELATIVE_GAP = 2.0 ** -8  # smallest |a - b| / max(|a|, |b|) of two different normal bf16 numbers (hit at powers of two)
ABSOLUTE_TOLERANCE = 1e-5  # Mukherjee et al., arXiv 2505.11711
CHUNK_BYTES = 64 << 20     # of one end; a unit of work and of the progress bar
BLOCK_ELEMENTS = 1 << 16   # float32 temporaries of one block (256 KiB each) stay in a core's cache
CUDA_BLOCK_ELEMENTS = 1 << 22  # fewer, larger kernels
# Below this magnitude squares of float32 vanish, above it their sums overflow; blocks outside are measured in float64.
FLOAT32_SQUARES = (1e-12, 1e15)

ULP_BINS = (-16, 10)       # powers of two: |dw| / ULP in [2^-16, 2^10), with one bin below and one above
RELATIVE_BINS = (-30, 1)   # |dw| / max(|w|, |w'|) in [2^-30, 2]; it cannot exceed 2
BF16_MIN_EXPONENT = -126   # of normal numbers; subnormals and zero share the ULP of this binade, 2^-133

STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
NOT_PARAMETERS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|position_ids|num_batches_tracked)$")  # buffers that old tools saved

DEFINITIONS = {
    "seed_formula_bf16": "|w - w'| > eta * max(|w|, |w'|) on both ends rounded to bf16",
    "seed_formula_stored": "|w - w'| > eta * max(|w|, |w'|) on the stored values",
    "exact_stored": "w != w' on the stored values (+0 equals -0)",
    "bf16_bits": "different bits after rounding to bf16 (+0 differs from -0)",
    "absolute_1e-5": "|w - w'| > 1e-5 on both ends rounded to bf16 (Mukherjee et al.)",
    "absolute_1e-5_stored": "|w - w'| > 1e-5 on the stored values",
}


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints: which tensors lie where

@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str                     # torch's name, e.g. "bfloat16"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass
class Checkpoint:
    """An opened checkpoint; weights stay on disk (memory-mapped) until a chunk is touched."""

    label: str                     # as the user named it
    folder: Path
    tensors: dict[str, StoredTensor]
    config: dict[str, Any]         # config.json, {} without one
    identity: dict[str, Any]       # rlvr_run.json, {} without one
    skipped: list[str]             # stored, but not floating-point parameters
    handles: dict[Path, Any] = field(default_factory=dict, repr=False)

    def flat(self, name: str) -> torch.Tensor:
        """Tensor ``name`` as a 1-D view of the mapped file; nothing is read yet."""
        stored = self.tensors[name]
        if stored.file not in self.handles:
            self.handles[stored.file] = _open_safetensors(stored.file)
        return self.handles[stored.file].get_tensor(name).reshape(-1)

    def close(self) -> None:
        self.handles.clear()


def resolve_checkpoint(name: str, flag: str) -> Path:
    """Folder (or single safetensors file) that ``name`` stands for; a hub id ``owner/name[@revision]`` is downloaded.

    Raises: UserError naming ``flag`` when a local path does not exist; WorkError when the download fails.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/([\w.-]+)(?:@([\w./-]+))?", name)
    if not match or Path(match.group(1)).is_dir():
        raise UserError(f"{flag} {name}: no such folder (a hub id has the form owner/name)")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(f"{match.group(1)}/{match.group(2)}", revision=match.group(3),
                                      allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json"],
                                      ignore_patterns=["consolidated*", "optimizer*"]))
    except Exception as error:  # the hub client raises many kinds: network, gated, not found, disk
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WorkError(f"{flag} {name}: no such folder here, and it could not be downloaded from the hub: {reason}") from None


def _weight_files(path: Path, flag: str) -> tuple[list[Path], dict[str, str]]:
    """Safetensors files of a checkpoint and, for an indexed one, its map from tensor to file name."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{flag} {path}: not a safetensors file; {_PICKLE_REASON}")
        return [path], {}
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: has no weight_map; save the checkpoint again")
        files = [path / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.exists():
                raise UserError(f"{flag}: shard {file} is missing (listed in {index.name})")
        return files, weight_map
    files = sorted(path.glob("model.safetensors")) or sorted(path.glob("model-*-of-*.safetensors"))
    if files:
        total = re.search(r"-of-0*(\d+)\.safetensors$", files[0].name)
        if total and len(files) != int(total.group(1)):
            raise UserError(f"{flag} {path}: {len(files)} of {total.group(1)} shards are there; copy the missing ones")
        return files, {}
    if (path / "adapter_model.safetensors").exists():
        raise UserError(f"{flag} {path}: holds a LoRA adapter, not a model; merge it into its base first")
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(path.glob(pattern))]
    if pickles:
        raise UserError(f"{flag} {path}: {pickles[0]}: {_PICKLE_REASON}")
    hint = f"; did you mean {path / 'final_model'}?" if (path / "final_model").is_dir() else ""
    raise UserError(f"{flag} {path}: no model.safetensors and no model.safetensors.index.json in it{hint}")


_PICKLE_REASON = "pickle checkpoints are refused (loading one can run any code); save it as safetensors with save_pretrained"


def _open_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: truncated or corrupt safetensors file ({error}); copy or save it again") from None


def open_checkpoint(name: str, flag: str = "checkpoint") -> Checkpoint:
    """Open a checkpoint and list its parameters without reading any weight.

    Args:    name: folder, safetensors file or hub id. flag: how messages call it, e.g. "--base_ckpt".
    Raises:  UserError (missing, pickle, truncated, unknown number format), WorkError (download failed).
    """
    path = resolve_checkpoint(name, flag)
    files, weight_map = _weight_files(path, flag)
    tensors: dict[str, StoredTensor] = {}
    skipped, handles = [], {}
    for file in files:
        handles[file] = _open_safetensors(file)
        for key in handles[file].keys():
            if weight_map and weight_map.get(key) != file.name:
                continue  # the index decides which of two copies is the model's
            if key in tensors:
                raise UserError(f"{flag}: tensor {key} is in both {tensors[key].file} and {file}")
            view = handles[file].get_slice(key)
            if NOT_PARAMETERS.search(key) or not view.get_dtype().startswith(("F", "BF")):
                skipped.append(key)
                continue
            if view.get_dtype() not in STORED_DTYPES:
                raise UserError(f"{file}: {key} is stored as {view.get_dtype()}; this tool reads {', '.join(STORED_DTYPES)}")
            tensors[key] = StoredTensor(file, tuple(view.get_shape()), STORED_DTYPES[view.get_dtype()])
    lost = sorted(set(weight_map) - set(tensors) - set(skipped))
    if lost:
        raise UserError(f"{flag}: {path / weight_map[lost[0]]} does not hold {lost[0]}, which the index places there")
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    identity = read_json(folder / "rlvr_run.json") if (folder / "rlvr_run.json").exists() else {}
    return Checkpoint(name, folder, tensors, config, identity, skipped, handles)


# --------------------------------------------------------------------------------------------------------------------
# Names: layer and module kind, tied tensors, pairing

KIND_PATTERNS = (  # first match wins; q_norm and k_norm are norms
    ("norm", r"(norm|\bln_\w+|layernorm)"),
    ("head", r"(^|\.)(lm_head|embed_out|output_projection)\."),
    ("embedding", r"(embed_tokens|word_embeddings|\bwte\b|\bwpe\b|embed_in|embeddings?)\."),
    ("q", r"\bq_proj\."), ("k", r"\bk_proj\."), ("v", r"\bv_proj\."), ("o", r"\b(o_proj|out_proj)\."),
    ("gate", r"\bgate_proj\."), ("up", r"\bup_proj\."), ("down", r"\bdown_proj\."),
)
KINDS = ("q", "k", "v", "o", "gate", "up", "down", "norm", "embedding", "head", "other")
OUTSIDE_LAYERS = "outside"  # key of by_layer for embedding, final norm and head


def module_kind(name: str) -> str:
    """One of KINDS for a parameter name, weights and biases alike."""
    return next((kind for kind, pattern in KIND_PATTERNS if re.search(pattern, name)), "other")


def layer_index(name: str) -> int | None:
    """Number of the transformer block a parameter belongs to, or None outside the blocks."""
    match = re.search(r"\b(?:layers|h|blocks|layer|block)\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _input_embedding(tensors: dict[str, StoredTensor]) -> str | None:
    found = [n for n in tensors if re.search(r"(embed_tokens|\bwte|word_embeddings|embed_in)\.weight$", n)]
    return found[0] if len(found) == 1 else None


def _same_bits(checkpoint: Checkpoint, first: str, second: str) -> bool:
    import torch
    one, two = checkpoint.tensors[first], checkpoint.tensors[second]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    bits = _bit_type(getattr(torch, one.dtype))
    return torch.equal(checkpoint.flat(first).view(bits), checkpoint.flat(second).view(bits))


def drop_tied_copies(ends: list[Checkpoint]) -> dict[str, Any] | None:
    """Remove a stored copy of the input embedding (a tied head) from every end, so that it counts once.

    A head is tied when config.json of an end says so; without that key, when one end has no head although the other's equals its
    own embedding bit for bit, or when it is such a copy at every end. Returns what was done, or None without a tied head.
    """
    embedding = _input_embedding(ends[0].tensors)
    heads = sorted({n for end in ends for n in end.tensors if module_kind(n) == "head" and n.endswith(".weight")})
    if embedding is None or len(heads) != 1 or any(embedding not in end.tensors for end in ends):
        return None
    head = heads[0]
    stored = [end for end in ends if head in end.tensors]
    said = [end.config["tie_word_embeddings"] for end in ends if "tie_word_embeddings" in end.config]
    copies = [_same_bits(end, head, embedding) for end in stored]
    if True in said:
        reason = "config.json says tie_word_embeddings"
    elif False not in said and all(copies):
        reason = "every stored head equals the embedding bit for bit"
    else:
        return None
    for end in stored:
        end.tensors.pop(head)
    return {"head": head, "counted_as": embedding, "reason": reason, "stored_as_copy_in": [end.label for end in stored],
            "copies_identical": all(copies)}


@dataclass
class Pairing:
    names: list[str]               # in both ends, same shape, sorted
    missing: dict[str, Any]        # what could not be paired (empty lists unless allow_missing)


def pair_tensors(base: Checkpoint, ft: Checkpoint, allow_missing: bool) -> Pairing:
    """Parameters that both ends hold in the same shape. Raises UserError naming what does not fit."""
    kinds = [c.config.get("model_type") for c in (base, ft)]
    if all(kinds) and kinds[0] != kinds[1] and not allow_missing:
        raise UserError(f"different architectures: {base.label} is {kinds[0]}, {ft.label} is {kinds[1]} (model_type in config.json)")
    only_base = sorted(set(base.tensors) - set(ft.tensors))
    only_ft = sorted(set(ft.tensors) - set(base.tensors))
    both = sorted(set(base.tensors) & set(ft.tensors))
    reshaped = {n: [list(base.tensors[n].shape), list(ft.tensors[n].shape)] for n in both
                if base.tensors[n].shape != ft.tensors[n].shape}
    names = [n for n in both if n not in reshaped]
    if not names:
        example = f"; {base.label} has {only_base[0]}, {ft.label} has {only_ft[0]}" if only_base and only_ft else ""
        raise UserError(f"{base.label} and {ft.label} have no parameter in common: different architectures{example}")
    if not allow_missing:
        for end, absent in ((ft, only_base), (base, only_ft)):
            if absent:
                raise UserError(f"{end.label} has no tensor {_listing(absent)}; --allow_missing compares the rest and counts them")
        if reshaped:
            name, (one, two) = next(iter(reshaped.items()))
            more = f" and {len(reshaped) - 1} more" if len(reshaped) > 1 else ""
            raise UserError(f"different shapes: {name} is {one} in {base.label} and {two} in {ft.label}{more}; "
                            "--allow_missing compares the rest and counts them")
    count = sum(base.tensors[n].num_elements for n in [*only_base, *reshaped])
    return Pairing(names, {"only_in_base": only_base, "only_in_ft": only_ft, "different_shape": reshaped,
                           "num_base_params_not_compared": count,
                           "num_ft_params_not_compared": sum(ft.tensors[n].num_elements for n in [*only_ft, *reshaped])})


def _listing(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


# --------------------------------------------------------------------------------------------------------------------
# Counting one block

@dataclass
class Moved:
    """Counts and sums over some elements. Sums are lists of block sums, added with fsum: no order or chunking changes them."""

    num_params: int = 0
    nonfinite_base: int = 0
    nonfinite_ft: int = 0
    nonfinite_either: int = 0
    cast_overflow: int = 0         # finite as stored, infinite in bf16 at one end or both
    changed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DEFINITIONS, 0))
    max_abs: float = 0.0
    sum_abs: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)       # of dw
    base_squares: list[float] = field(default_factory=list)
    ft_squares: list[float] = field(default_factory=list)
    histogram: Any = 0             # int64 (ULP bin, relative bin), finite elements with w != w'

    def settle(self) -> Moved:
        """The same with each list of sums replaced by its one exact total."""
        for name in ("sum_abs", "squares", "base_squares", "ft_squares"):
            setattr(self, name, [math.fsum(getattr(self, name))])
        return self


def combine(parts: Iterable[Moved]) -> Moved:
    """Totals over disjoint sets of elements."""
    total = Moved()
    for part in parts:
        for name in ("num_params", "nonfinite_base", "nonfinite_ft", "nonfinite_either", "cast_overflow"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name, count in part.changed.items():
            total.changed[name] += count
        total.max_abs = max(total.max_abs, part.max_abs)
        for name in ("sum_abs", "squares", "base_squares", "ft_squares"):
            getattr(total, name).extend(getattr(part, name))
        total.histogram = total.histogram + part.histogram
    return total


def _bit_type(dtype: torch.dtype) -> torch.dtype:
    import torch
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _count(mask: torch.Tensor) -> int:
    import torch
    return int(torch.count_nonzero(mask))


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Indices of True. On CPU through numpy, which is 5 to 8 times faster than torch.nonzero here."""
    import numpy as np
    import torch
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def _max_magnitude(x: torch.Tensor) -> float:
    """Largest |x|; NaN or infinity if there is one."""
    import torch
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def _sum_squares(x: torch.Tensor, largest: float) -> float:
    """Sum of squares of a 1-D block. float32 is enough for 65,536 terms (relative error < 1e-5) inside FLOAT32_SQUARES."""
    import torch
    if largest == 0.0:
        return 0.0
    if x.dtype == torch.float32 and not FLOAT32_SQUARES[0] < largest < FLOAT32_SQUARES[1]:
        x = x.double()
    return float(torch.dot(x, x))


def _exponent_bits(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(biased exponent field, bias) of non-negative float32 or float64 values."""
    import torch
    if x.dtype == torch.float32:
        return x.view(torch.int32) >> 23, 127
    return x.view(torch.int64) >> 52, 1023


def update_histogram(base: torch.Tensor, delta: torch.Tensor, largest: torch.Tensor) -> np.ndarray | None:
    """Joint histogram of |dw| in bf16 ULPs of w and of |dw| / max(|w|, |w'|), in powers of two.

    Args:    base: w. delta: |w' - w|. largest: max(|w|, |w'|). All 1-D, finite, float32 or float64.
    Returns: int64 (ULP bins + 2, relative bins + 1); the first bin of each axis is "below" and holds delta == 0 as well.
             None if float32 is too narrow for a delta here (subnormal): repeat in float64.
    """
    import numpy as np
    import torch
    exponent, bias = _exponent_bits(delta)
    if delta.dtype == torch.float32 and _count(exponent) != _count(delta):
        return None
    ulp_exponent = _exponent_bits(base.abs())[0].clamp_min_(BF16_MIN_EXPONENT + bias)
    low, high = ULP_BINS
    # bf16 has 7 fraction bits: ULP(w) = 2^(exponent(w) - 7), so floor(log2(|dw| / ULP)) is a difference of exponents.
    ulp_bin = (exponent - ulp_exponent).add_(7 - low + 1).clamp_(0, high - low + 1)
    low, high = RELATIVE_BINS
    # clamp: 0 / 0 where both ends are zero
    relative = delta / largest.clamp_min(torch.finfo(delta.dtype).tiny)
    relative_bin = _exponent_bits(relative)[0].add(1 - bias - low).clamp_(0, high - low + 1)
    shape = (ULP_BINS[1] - ULP_BINS[0] + 2, high - low + 2)
    joint = ulp_bin.mul_(shape[1]).add_(relative_bin)
    counts = torch.bincount(joint, minlength=shape[0] * shape[1])
    return counts.reshape(shape).cpu().numpy().astype(np.int64)


def measure_block(base: torch.Tensor, ft: torch.Tensor, eta: float = DEFAULT_ETA) -> Moved:
    """Every count of this tool for one block of weights.

    Args:    base, ft: 1-D, same length, any of bfloat16, float16, float32, float64 (also different ones).
             eta: relative tolerance of the seed formula.
    Returns: Moved. Elements that are not finite at both ends count as changed in every definition and enter no sum.
    Source:  seed formula: arXiv 2511.08567 Def. 2.1-2.2; absolute tolerance: arXiv 2505.11711.
    """
    import torch
    stored = torch.promote_types(base.dtype, ft.dtype)
    base, ft = base.to(stored), ft.to(stored)  # widening only, exact
    moved = Moved(num_params=base.numel())
    if base.numel() == 0:
        return moved
    at_least_float32 = torch.promote_types(stored, torch.float32)
    w, w_new = base.to(at_least_float32), ft.to(at_least_float32)
    sizes = _max_magnitude(w), _max_magnitude(w_new)
    if not all(map(math.isfinite, sizes)):
        return _measure_nonfinite(base, ft, eta)
    moved.base_squares.append(_sum_squares(w, sizes[0]))
    moved.ft_squares.append(_sum_squares(w_new, sizes[1]))

    bits = _bit_type(stored)
    differ = base.view(bits) != ft.view(bits)
    num_differ = _count(differ)
    if num_differ == 0:
        return moved
    if 2 * num_differ < base.numel():  # equal bits are unchanged under every definition; skip them where that pays
        where = _positions(differ)
        base, ft, w, w_new = (x.index_select(0, where) for x in (base, ft, w, w_new))

    # float32 is exact enough for bf16 values with eta below their smallest gap: no value lies near the threshold.
    in_float32 = stored == torch.bfloat16 and eta < BF16_MIN_RELATIVE_GAP and max(sizes) < FLOAT32_SQUARES[1]
    if not (in_float32 and _add_deltas(moved, w, w_new, eta)):
        _add_deltas(moved, w.double(), w_new.double(), eta)

    if stored == torch.bfloat16:
        moved.changed["bf16_bits"] = num_differ
        moved.changed["seed_formula_bf16"] = moved.changed["seed_formula_stored"]
        moved.changed["absolute_1e-5"] = moved.changed["absolute_1e-5_stored"]
    else:
        _add_cast_counts(moved, base.to(torch.bfloat16), ft.to(torch.bfloat16), eta,
                         may_overflow=max(sizes) > torch.finfo(torch.bfloat16).max)
    return moved


def _add_deltas(moved: Moved, w: torch.Tensor, w_new: torch.Tensor, eta: float) -> bool:
    """Fill in what depends on stored values. False, and nothing filled in, if float32 is too narrow (see update_histogram)."""
    import torch
    delta = (w_new - w).abs_()
    largest = torch.maximum(w.abs(), w_new.abs())
    histogram = update_histogram(w, delta, largest)
    if histogram is None:
        return False
    num_moved = _count(delta)
    histogram[0, 0] -= delta.numel() - num_moved  # delta == 0: other zeros' signs, or equal elements of a dense block
    moved.histogram = histogram
    moved.changed["exact_stored"] = num_moved
    moved.changed["seed_formula_stored"] = _count(delta > eta * largest)
    moved.changed["absolute_1e-5_stored"] = _count(delta > ABSOLUTE_TOLERANCE)
    moved.max_abs = float(delta.amax())
    moved.sum_abs.append(float(delta.sum()))
    moved.squares.append(_sum_squares(delta, moved.max_abs))
    return True


def _add_cast_counts(moved: Moved, base: torch.Tensor, ft: torch.Tensor, eta: float, may_overflow: bool) -> None:
    """Fill in the definitions on values rounded to bf16 (nearest, ties to even)."""
    import torch
    if may_overflow:  # a finite value above bf16's largest became infinite: changed under every definition, even at both ends
        infinite = torch.isinf(base) | torch.isinf(ft)
        moved.cast_overflow = _count(infinite)
        for name in ("bf16_bits", "seed_formula_bf16", "absolute_1e-5"):
            moved.changed[name] += moved.cast_overflow
        base, ft = base[~infinite], ft[~infinite]
    where = _positions(base.view(torch.int16) != ft.view(torch.int16))
    wide = torch.float32 if eta < BF16_MIN_RELATIVE_GAP else torch.float64  # as in measure_block
    w, w_new = base.index_select(0, where).to(wide), ft.index_select(0, where).to(wide)
    delta, largest = (w_new - w).abs_(), torch.maximum(w.abs(), w_new.abs())
    moved.changed["bf16_bits"] += where.numel()
    moved.changed["seed_formula_bf16"] += _count(delta > eta * largest)
    moved.changed["absolute_1e-5"] += _count(delta > ABSOLUTE_TOLERANCE)


def _measure_nonfinite(base: torch.Tensor, ft: torch.Tensor, eta: float) -> Moved:
    """measure_block for a block with NaN or infinities: they are changed, the rest is measured as usual."""
    import torch
    bad_base, bad_ft = ~torch.isfinite(base), ~torch.isfinite(ft)
    bad = bad_base | bad_ft
    moved = measure_block(base[~bad], ft[~bad], eta)
    either = _count(bad)
    moved.num_params += either
    moved.nonfinite_base, moved.nonfinite_ft, moved.nonfinite_either = _count(bad_base), _count(bad_ft), either
    for name in moved.changed:
        moved.changed[name] += either
    return moved


# --------------------------------------------------------------------------------------------------------------------
# Counting two checkpoints

def _chunks(names: list[str], base: Checkpoint, chunk_bytes: int, block: int) -> Iterator[tuple[str, int, int]]:
    """(tensor, first element, end) pieces of at most ``chunk_bytes`` of one float32 end, each a whole number of blocks."""
    step = max(chunk_bytes // 4 // block, 1) * block
    for name in names:
        total = base.tensors[name].num_elements
        for start in range(0, total, step):
            yield name, start, min(start + step, total)


def _run_in_threads(work: Callable, items: list, workers: int) -> Iterator[Any]:
    """Results of ``work(item)`` in the order of items. Torch runs single-threaded inside: blocks are cache-sized."""
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(before)


def _worker_count(num_threads: int) -> int:
    import torch
    return num_threads or max(torch.get_num_threads(), 1)


def _pick_device(device: str) -> str:
    import torch
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine or this torch has no CUDA device; use --device cpu")
    return device


def measure_tensors(base: Checkpoint, ft: Checkpoint, names: list[str], eta: float = DEFAULT_ETA, device: str = "cpu",
                    chunk_bytes: int = CHUNK_BYTES, num_threads: int = 0, progress: bool = False) -> dict[str, Moved]:
    """Moved of every tensor in ``names``, streamed; anonymous memory stays below a few blocks (CPU) or chunks (CUDA)."""
    from tqdm import tqdm
    block = CUDA_BLOCK_ELEMENTS if device == "cuda" else BLOCK_ELEMENTS
    width = {n: _item_bytes(base.tensors[n].dtype) + _item_bytes(ft.tensors[n].dtype) for n in names}
    items = list(_chunks(names, base, chunk_bytes, block))

    def measure_chunk(item: tuple[str, int, int]) -> Moved:
        name, start, end = item
        one, two = (c.flat(name)[start:end].to(device) for c in (base, ft))
        return combine(measure_block(one[i:i + block], two[i:i + block], eta) for i in range(0, end - start, block))

    parts: dict[str, list[Moved]] = {n: [] for n in names}
    total = sum(width[n] * base.tensors[n].num_elements for n in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="compared", disable=None if progress else True) as bar:
        for item, moved in zip(items, _run_in_threads(measure_chunk, items, _worker_count(num_threads))):
            parts[item[0]].append(moved)
            bar.update(width[item[0]] * (item[2] - item[1]))
    return {n: combine(parts[n]).settle() for n in names}


def _item_bytes(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]


# --------------------------------------------------------------------------------------------------------------------
# Counts as JSON

def sparsity_percent(num_changed: int, num_params: int) -> float | None:
    """100 * share of elements that did not change; None for no elements."""
    return 100.0 * (1.0 - num_changed / num_params) if num_params else None


def definitions_block(moved: Moved, with_meaning: bool = False) -> dict[str, Any]:
    """{definition: {sparsity_percent, num_changed}}."""
    return {name: {"sparsity_percent": sparsity_percent(count, moved.num_params), "num_changed": count,
                   **({"changed_if": DEFINITIONS[name]} if with_meaning else {})}
            for name, count in moved.changed.items()}


def _histogram_block(counts: list[int], low: int, high: int, num_equal: int, quantity: str) -> dict[str, Any]:
    """Counts over (0, 2^low), [2^low, 2^(low+1)), ..., the last bin open above; equal elements are told apart."""
    half, seen, median = sum(counts) / 2, 0, None
    for i, count in enumerate(counts):
        seen += count
        if count and seen >= half:
            median = [None if i == 0 else 2.0 ** (low + i - 1), None if i == len(counts) - 1 else 2.0 ** (low + i)]
            break
    return {"quantity": quantity, "bin_lower_edges": [0.0] + [2.0 ** e for e in range(low, high + 1)], "counts": counts,
            "num_equal": num_equal, "median_of_moved_between": median}


def histogram_blocks(moved: Moved) -> dict[str, Any]:
    """ulp_histogram and relative_histogram over finite elements whose stored values differ."""
    import numpy as np
    joint = np.zeros((ULP_BINS[1] - ULP_BINS[0] + 2, RELATIVE_BINS[1] - RELATIVE_BINS[0] + 2), dtype=np.int64) + moved.histogram
    finite = moved.num_params - moved.nonfinite_either
    num_equal = finite - (moved.changed["exact_stored"] - moved.nonfinite_either)
    ulp = _histogram_block(joint.sum(axis=1).tolist(), *ULP_BINS, num_equal, "|w' - w| / ULP_bf16(w), stored values")
    below_half = sum(c for c, edge in zip(ulp["counts"], ulp["bin_lower_edges"]) if edge < 0.5)
    ulp["num_moved_below_half_ulp"] = int(below_half)
    return {"ulp_histogram": ulp,
            "relative_histogram": _histogram_block(joint.sum(axis=0).tolist(), *RELATIVE_BINS, num_equal,
                                                   "|w' - w| / max(|w|, |w'|), stored values")}


def delta_block(moved: Moved) -> dict[str, Any]:
    """Size of the update over finite elements: largest, mean, norms (Frobenius)."""
    finite = moved.num_params - moved.nonfinite_either
    num_moved = moved.changed["exact_stored"] - moved.nonfinite_either
    total, norm, base_norm = math.fsum(moved.sum_abs), _root(moved.squares), _root(moved.base_squares)
    block = {"max_abs": moved.max_abs, "mean_abs": total / finite if finite else None,
             "mean_abs_of_moved": total / num_moved if num_moved else None, "norm": norm, "base_norm": base_norm,
             "ft_norm": _root(moved.ft_squares), "relative_norm": norm / base_norm if base_norm and norm is not None else None}
    return block


def _root(squares: list[float]) -> float | None:
    total = math.fsum(squares)
    return math.sqrt(total) if math.isfinite(total) else None


def _group_block(moved: Moved) -> dict[str, Any]:
    return {"num_params": moved.num_params, "sparsity_percent": sparsity_percent(moved.changed["seed_formula_bf16"], moved.num_params),
            "definitions": definitions_block(moved), "delta": delta_block(moved), "num_nonfinite": moved.nonfinite_either}


def _layer_key(name: str) -> str:
    layer = layer_index(name)
    return OUTSIDE_LAYERS if layer is None else str(layer)


def _grouped(measured: dict[str, Moved], key: Callable[[str], str]) -> dict[str, Moved]:
    groups: dict[str, list[Moved]] = {}
    for name, moved in measured.items():
        groups.setdefault(key(name), []).append(moved)
    return {k: combine(v) for k, v in groups.items()}


def _layer_order(key: str) -> tuple[bool, int]:
    return (key == OUTSIDE_LAYERS, 0 if key == OUTSIDE_LAYERS else int(key))


IDENTITY_KEYS = ("study", "arm", "precision_mode", "overrides", "seed", "replicate", "noise_replicate", "config_hash")


def comparison_report(base: Checkpoint, ft: Checkpoint, pairing: Pairing, tied: dict | None, measured: dict[str, Moved],
                      eta: float) -> dict[str, Any]:
    """The JSON content of one comparison (without geometry)."""
    total = combine(measured.values())
    changed = total.changed["seed_formula_bf16"]
    layers = _grouped(measured, _layer_key)
    kinds = _grouped(measured, module_kind)
    cells = _grouped(measured, lambda n: f"{_layer_key(n)}/{module_kind(n)}")
    return {
        **{k: ft.identity[k] for k in IDENTITY_KEYS if k in ft.identity},
        "base_ckpt": base.label, "ft_ckpt": ft.label,
        "sparsity": {"sparsity_percent": sparsity_percent(changed, total.num_params), "num_changed": changed,
                     "num_params": total.num_params, "eta": eta},
        "definitions": definitions_block(total, with_meaning=True),
        "nonfinite": {"num_base": total.nonfinite_base, "num_ft": total.nonfinite_ft, "num_either": total.nonfinite_either,
                      "num_finite_but_infinite_in_bf16": total.cast_overflow,
                      "rule": "counted as changed under every definition (the last only under those on bf16 values)"},
        "delta": delta_block(total),
        **histogram_blocks(total),
        "by_layer": {k: _group_block(layers[k]) for k in sorted(layers, key=_layer_order)},
        "by_module_kind": {k: {**_group_block(kinds[k]), **histogram_blocks(kinds[k])} for k in KINDS if k in kinds},
        "by_layer_and_kind": {k: {"num_params": m.num_params, "num_changed": m.changed["seed_formula_bf16"],
                                  "sparsity_percent": sparsity_percent(m.changed["seed_formula_bf16"], m.num_params)}
                              for k, m in cells.items()},
        "tensors": {n: {"shape": list(base.tensors[n].shape), "base_dtype": base.tensors[n].dtype, "ft_dtype": ft.tensors[n].dtype,
                        "layer": layer_index(n), "kind": module_kind(n), "num_params": m.num_params, "num_changed": dict(m.changed),
                        "num_nonfinite": m.nonfinite_either, "delta": delta_block(m)} for n, m in measured.items()},
        "dtypes": {"base": sorted({base.tensors[n].dtype for n in measured}), "ft": sorted({ft.tensors[n].dtype for n in measured})},
        "tied": tied, "missing": pairing.missing,
        "skipped_not_parameters": sorted(set(base.skipped) | set(ft.skipped)),
    }


def compare_checkpoints(base_ckpt: str | Path, ft_ckpt: str | Path, eta: float = DEFAULT_ETA, *, device: str = "cpu",
                        allow_missing: bool = False, chunk_bytes: int = CHUNK_BYTES, num_threads: int = 0,
                        progress: bool = False) -> dict[str, Any]:
    """Which weights differ between two checkpoints: the content of ``{run}_sparsity.json``.

    Args:    base_ckpt, ft_ckpt: folder, safetensors file or hub id; any float formats, also different ones at the two ends.
             eta: relative tolerance of the seed formula. device: "cpu", "cuda" or "auto".
             allow_missing: compare what both ends hold and count the rest, instead of raising.
             chunk_bytes: unit of work; num_threads: 0 for torch's number. Neither changes any number.
    Returns: strict-JSON dict; ``sparsity.sparsity_percent`` is 100 * (1 - num_changed / num_params).
    Raises:  UserError for checkpoints that cannot be compared, WorkError for a failed download.
    Source:  arXiv 2511.08567 Def. 2.1-2.2 and arXiv 2505.11711.
    """
    started = time.perf_counter()
    _check_eta(eta)
    device = _pick_device(device)
    base, ft = open_checkpoint(str(base_ckpt), "--base_ckpt"), open_checkpoint(str(ft_ckpt), "--ft_ckpt")
    tied = drop_tied_copies([base, ft])
    pairing = pair_tensors(base, ft, allow_missing)
    measured = measure_tensors(base, ft, pairing.names, eta, device, chunk_bytes, num_threads, progress)
    report = comparison_report(base, ft, pairing, tied, measured, eta)
    num_bytes = sum(base.tensors[n].num_elements * (_item_bytes(base.tensors[n].dtype) + _item_bytes(ft.tensors[n].dtype))
                    for n in pairing.names)
    seconds = time.perf_counter() - started
    report["run_cost"] = {"seconds": seconds, "bytes_compared": num_bytes, "gigabytes_per_second": num_bytes / 1e9 / seconds,
                          "device": device, "threads": _worker_count(num_threads)}
    return report


def _check_eta(eta: float) -> None:
    if not 0.0 <= eta < 1.0:
        raise UserError(f"--eta {eta}: must be at least 0 and below 1 (the default {DEFAULT_ETA} equals bit equality on bf16 values)")


# --------------------------------------------------------------------------------------------------------------------

def main(cfg: SparsityConfig) -> None:
    for name in ("base_ckpt", "ft_ckpt", "output_path"):
        if getattr(cfg, name) is None:
            raise UserError(f"--{name} is required")
    require_writable_dir(Path(cfg.output_path).parent)
    report = compare_checkpoints(cfg.base_ckpt, cfg.ft_ckpt, cfg.eta, device=cfg.device, allow_missing=cfg.allow_missing,
                                 chunk_bytes=cfg.chunk_mib << 20, num_threads=cfg.num_threads, progress=True)
    report["versions"] = package_versions(("torch", "numpy", "safetensors"))
    write_json(cfg.output_path, report)
    print_summary(report)
    print(f"written: {cfg.output_path}")


def print_summary(report: dict[str, Any]) -> None:
    """The five definitions on a few lines."""
    sparsity = report["sparsity"]
    print(f"{report['base_ckpt']} -> {report['ft_ckpt']}: {sparsity['num_params']:,} parameters, eta {sparsity['eta']:g}")
    for name, row in report["definitions"].items():
        print(f"  {name:22s} {row['sparsity_percent']:9.4f} % unchanged  {row['num_changed']:>14,} changed  ({row['changed_if']})")
    if report["nonfinite"]["num_either"]:
        print(f"  warning: {report['nonfinite']['num_either']:,} elements are NaN or infinite; counted as changed")


if __name__ == "__main__":
    run_script(main, SparsityConfig, description=__doc__)
