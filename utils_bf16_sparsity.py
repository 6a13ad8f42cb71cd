"""Which weights moved between two checkpoints, as bf16 sees it and as they are stored.

In:   two checkpoint folders (or hub ids) with safetensors weights; several in the modes --compare and --trajectory.
Out:  one strict JSON file: `sparsity` (the seed formula on both ends cast to bf16), `definitions` (other meanings of
      "changed"), counts per tensor, layer and module kind, histograms of |dw| in bf16 ULPs and relative to the weight; with
      --geometry the measures of the Three-Gate paper (spectral shift, subspace rotation, mask overlaps); with --plots figures.

CPU smoke run:  python utils_bf16_sparsity.py --base_ckpt data/tiny_base --ft_ckpt RUN/final_model --output_path out.json
A 7B pair:      the same call on two 15 GB folders; each is read once, in anonymous memory of about 0.2 GB.

"Changed" is "not provably unchanged": an element with a NaN or an infinity at either end counts as changed under every
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
from utils_run import atomic_path, package_versions, read_json, require_writable_dir, run_script, write_json

if TYPE_CHECKING:  # torch is imported where it is used, so that --help is instant
    import numpy as np
    import torch

# Relative. Two different bf16 numbers are at least 2^-8 of the larger apart (hit at powers of two): with any eta below that,
# the seed formula is inequality of values there.
DEFAULT_ETA = 1e-3
ABSOLUTE_TOLERANCE = 1e-5  # Mukherjee et al., arXiv 2505.11711
MASK_BLOCK_ELEMENTS = 1 << 16
CHUNK_BYTES = 64 << 20     # of one end; a unit of work and of the progress bar
BLOCK_BYTES = 1 << 19      # of one end; the float32 temporaries of a block stay in a core's cache
CUDA_BLOCK_ELEMENTS = 1 << 20  # fewer, larger kernels; chunks are whole multiples of it
# Between these, a block's float32 sum of squares neither overflowed nor lost terms that matter; else float64 is used.
FLOAT32_SQUARES = (1e-20, 1e30)
FLOAT32_DOUBT = 2.0 ** -20     # relative; float32 quotients this close to a threshold are decided in float64
FLOAT32_SMALLEST = 2.0 ** -149

# Geometry
EXACT_SVD_MAX_DIM = 1024   # smaller side; a 1024 x 4096 float64 SVD takes seconds on two cores, cost grows with the cube
SVD_OVERSAMPLING, SVD_ITERATIONS, SVD_SEED = 16, 6, 0  # randomised SVD; what it missed is measured, not assumed
NORM_COLUMNS, NORM_ITERATIONS, NORM_SAFETY = 8, 24, 1.01  # power iteration for norms; the factor covers its shortfall
PRINCIPAL_ENERGY = 0.5     # share of ||W||_F^2 that the default principal subspace holds
MAX_PRINCIPAL_RANK = 256   # bounds the cost on 7B matrices, where half the energy needs more

ULP_BINS = (-16, 10)       # powers of two: |dw| / ULP in [2^-16, 2^10), with one bin below and one above
RELATIVE_BINS = (-30, 1)   # |dw| / max(|w|, |w'|) in [2^-30, 2]; it cannot exceed 2
BF16_MIN_EXPONENT = -126   # of normal numbers; subnormals and zero share the ULP of this binade, 2^-133

STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
NOT_PARAMETERS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|position_ids|num_batches_tracked)$")  # saved buffers

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
        raise WorkError(f"{flag} {name}: no such folder, and it could not be downloaded from the hub: {reason}") from None


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


_PICKLE_REASON = "pickle checkpoints are refused (loading one can run any code); save it with save_pretrained as safetensors"


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
                raise UserError(f"{file}: {key} is stored as {view.get_dtype()}; this reads {', '.join(STORED_DTYPES)}")
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

    A head is tied when config.json of an end says so or, where none has that key, when every head that is stored equals its
    own embedding bit for bit. Returns what was done, or None without a tied head.
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
        raise UserError(f"different architectures: {base.label} is {kinds[0]}, {ft.label} is {kinds[1]} "
                        "(model_type in config.json)")
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
                raise UserError(f"{end.label} has no tensor {_listing(absent)}; "
                                "--allow_missing compares the rest and counts them")
        if reshaped:
            name, (one, two) = next(iter(reshaped.items()))
            more = f" and {len(reshaped) - 1} more" if len(reshaped) > 1 else ""
            raise UserError(f"different shapes: {name} is {one} in {base.label} and {two} in {ft.label}{more}; "
                            "--allow_missing compares the rest and counts them")
    left_out = [sum(end.tensors[n].num_elements for n in [*only, *reshaped])
                for end, only in ((base, only_base), (ft, only_ft))]
    return Pairing(names, {"only_in_base": only_base, "only_in_ft": only_ft, "different_shape": reshaped,
                           "num_base_params_not_compared": left_out[0], "num_ft_params_not_compared": left_out[1]})


def _listing(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


# --------------------------------------------------------------------------------------------------------------------
# Counting one block

@dataclass
class Moved:
    """Counts and sums over some elements. Sums are lists of block sums added with fsum: order and chunking change nothing."""

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
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]


def _comparable(x: torch.Tensor) -> Any:
    """``x`` itself on CUDA; on CPU its numpy view, which compares and counts 5 to 10 times faster than torch (measured)."""
    return x.numpy() if x.device.type == "cpu" else x


def _count(mask: Any) -> int:
    """Number of True in a numpy or torch mask."""
    import numpy as np
    return int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else int(mask.sum())


def _positions(mask: Any) -> torch.Tensor:
    """Indices of True in a 1-D numpy or torch mask."""
    import numpy as np
    import torch
    return torch.from_numpy(np.flatnonzero(mask)) if isinstance(mask, np.ndarray) else mask.nonzero().squeeze(1)


def _exponent_bits(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(biased exponent field, bias) of non-negative float32 or float64 values."""
    import torch
    if x.dtype == torch.float32:
        return x.view(torch.int32) >> 23, 127
    return x.view(torch.int64) >> 52, 1023


def count_above(estimate: torch.Tensor, threshold: float, exact: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """How many elements exceed ``threshold``, decided in float64 where float32 could be wrong.

    Args:    estimate: 1-D, float32 or float64, with a relative error below FLOAT32_DOUBT / 2. threshold: 0 or more.
             exact: maps positions of doubtful elements to a mask of those that exceed it, computed in float64.
    """
    values = _comparable(estimate)
    surely = values > threshold * (1 + FLOAT32_DOUBT)
    possibly = values >= threshold * (1 - FLOAT32_DOUBT) if threshold else values > 0
    count = _count(surely)
    if count != _count(possibly):
        count += _count(exact(_positions(surely ^ possibly)))
    return count


def update_histogram(size: torch.Tensor, delta: torch.Tensor, relative: torch.Tensor) -> np.ndarray:
    """Joint histogram of |dw| in bf16 ULPs of w and of |dw| / max(|w|, |w'|), in powers of two.

    Args:    size: |w|. delta: |w' - w|, not subnormal. relative: delta / max(|w|, |w'|). All 1-D float32 or float64, finite.
    Returns: int64 (ULP bins + 2, relative bins + 1); the first bin of each axis is "below" and holds delta == 0 too.
    """
    import numpy as np
    import torch
    low, high = ULP_BINS
    exponent, bias = _exponent_bits(delta)
    # bf16 has 7 fraction bits: ULP(w) = 2^(exponent(w) - 7), so floor(log2(|dw| / ULP)) is a difference of exponents.
    ulp_exponent = _exponent_bits(size)[0].clamp_min_(BF16_MIN_EXPONENT + bias)
    ulp_bin = (exponent - ulp_exponent).add_(7 - low + 1).clamp_(0, high - low + 1)
    low, high = RELATIVE_BINS
    relative_bin = _exponent_bits(relative)[0].add_(1 - bias - low).clamp_(0, high - low + 1)
    shape = (ULP_BINS[1] - ULP_BINS[0] + 2, high - low + 2)
    counts = torch.bincount(ulp_bin.mul_(shape[1]).add_(relative_bin), minlength=shape[0] * shape[1])
    return counts.reshape(shape).cpu().numpy().astype(np.int64)


def measure_block(base: torch.Tensor, ft: torch.Tensor, eta: float = DEFAULT_ETA) -> Moved:
    """Every count of this tool for one block of weights.

    Args:    base, ft: 1-D, same length, each bfloat16, float16 or float32.
             eta: relative tolerance of the seed formula.
    Returns: Moved. Elements that are not finite at both ends count as changed in every definition and enter no sum.
             Counts are those of float64 arithmetic on the stored values; sums and bin edges carry float32 rounding.
    Source:  seed formula: arXiv 2511.08567 Def. 2.1-2.2; absolute tolerance: arXiv 2505.11711.
    """
    import torch
    stored = torch.promote_types(base.dtype, ft.dtype)
    base, ft = base.to(stored), ft.to(stored)  # widening only, exact
    moved = Moved(num_params=base.numel())
    if base.numel() == 0:
        return moved
    bits = _bit_type(stored)
    differ = _comparable(base.view(bits)) != _comparable(ft.view(bits))
    num_differ = _count(differ)

    w, new_squares = base.float(), None
    squares = _sum_squares(w)
    few, few_new = base, ft
    if 2 * num_differ < base.numel():  # equal bits are unchanged under every definition: leave them out where that pays
        where = _positions(differ)
        few, few_new, w = (x.index_select(0, where) for x in (base, ft, w))
        replaced = _sum_squares(w.double())
        if replaced <= squares / 2:  # no cancellation
            new_squares = squares - replaced + _sum_squares(few_new.double())
    w_new = few_new.float()
    if new_squares is None:
        new_squares = _sum_squares(ft.float())
    if not all(FLOAT32_SQUARES[0] < x < FLOAT32_SQUARES[1] for x in (squares, new_squares)):
        return _measure_extreme(base, ft, num_differ, eta)
    moved.base_squares.append(squares)
    moved.ft_squares.append(new_squares)
    if num_differ:
        _add_counts(moved, few, few_new, w, w_new, num_differ, eta)
    return moved


def _measure_extreme(base: torch.Tensor, ft: torch.Tensor, num_differ: int, eta: float) -> Moved:
    """measure_block for a block that is all zero, tiny, huge or not finite: in float64, without shortcuts."""
    import torch
    bad_base, bad_ft = ~torch.isfinite(base), ~torch.isfinite(ft)
    bad = bad_base | bad_ft
    either = _count(bad)
    if either:  # changed under every definition; the rest is measured as usual
        moved = measure_block(base[~bad], ft[~bad], eta)
        moved.num_params += either
        moved.nonfinite_base, moved.nonfinite_ft, moved.nonfinite_either = _count(bad_base), _count(bad_ft), either
        for name in moved.changed:
            moved.changed[name] += either
        return moved
    w, w_new = base.double(), ft.double()
    moved = Moved(num_params=base.numel(), base_squares=[_sum_squares(w)], ft_squares=[_sum_squares(w_new)],
                  cast_overflow=_count(_infinite_in_bf16(base, ft)))
    _add_counts(moved, base, ft, w, w_new, num_differ, eta)
    return moved


def _sum_squares(x: torch.Tensor) -> float:
    """torch.sum adds pairwise and, unlike a BLAS dot product, gives the same bits wherever the block lies in memory."""
    return float((x * x).sum())


def _add_counts(moved: Moved, base: torch.Tensor, ft: torch.Tensor, w: torch.Tensor, w_new: torch.Tensor, num_differ: int,
                eta: float) -> None:
    """Fill in every count; base and ft as stored, w and w_new the same values in float32 or float64."""
    import torch
    if not _add_stored_counts(moved, w, w_new, eta):
        _add_stored_counts(moved, w.double(), w_new.double(), eta)
    if base.dtype == torch.bfloat16:
        moved.changed["bf16_bits"] = num_differ
        moved.changed["seed_formula_bf16"] = moved.changed["seed_formula_stored"]
        moved.changed["absolute_1e-5"] = moved.changed["absolute_1e-5_stored"]
    else:
        _add_cast_counts(moved, base, ft, eta)


def _deltas(w: torch.Tensor, w_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """|w|, |w' - w| and |w' - w| / max(|w|, |w'|); the last is 0 where both are 0."""
    import torch
    size, delta = w.abs(), (w_new - w).abs_()
    largest = torch.maximum(size, w_new.abs()).clamp_min_(FLOAT32_SMALLEST)
    return size, delta, torch.div(delta, largest, out=largest)


def _counts_above(w: torch.Tensor, w_new: torch.Tensor, delta: torch.Tensor, relative: torch.Tensor,
                  eta: float) -> tuple[int, int]:
    """Changed by the seed formula, and by the absolute tolerance."""
    import torch
    def over_eta(where: torch.Tensor) -> torch.Tensor:
        x, y = w[where].double(), w_new[where].double()
        return (y - x).abs() > eta * torch.maximum(x.abs(), y.abs())
    def over_tolerance(where: torch.Tensor) -> torch.Tensor:
        return (w_new[where].double() - w[where].double()).abs() > ABSOLUTE_TOLERANCE
    return count_above(relative, eta, over_eta), count_above(delta, ABSOLUTE_TOLERANCE, over_tolerance)


def _add_stored_counts(moved: Moved, w: torch.Tensor, w_new: torch.Tensor, eta: float) -> bool:
    """Fill in what depends on stored values. False, with nothing filled in, if a difference is subnormal in float32."""
    import torch
    size, delta, relative = _deltas(w, w_new)
    num_moved = _count(_comparable(delta) >= torch.finfo(torch.float32).tiny)
    if num_moved < delta.numel():  # some are equal, or subnormal
        num_normal, num_moved = num_moved, _count(_comparable(delta) > 0)
        if delta.dtype == torch.float32 and num_normal < num_moved:
            return False
    moved.histogram = update_histogram(size, delta, relative)
    moved.histogram[0, 0] -= delta.numel() - num_moved  # delta == 0: zeros of other sign, equal elements of a dense block
    moved.changed["exact_stored"] = num_moved
    over_eta, over_tolerance = _counts_above(w, w_new, delta, relative, eta)
    moved.changed["seed_formula_stored"], moved.changed["absolute_1e-5_stored"] = over_eta, over_tolerance
    moved.max_abs = float(delta.amax())
    moved.sum_abs.append(float(delta.sum()))
    if moved.max_abs ** 2 < FLOAT32_SQUARES[0]:
        delta = delta.double()
    moved.squares.append(_sum_squares(delta))
    return True


def _infinite_in_bf16(base: torch.Tensor, ft: torch.Tensor) -> torch.Tensor:
    import torch
    return torch.isinf(base.to(torch.bfloat16)) | torch.isinf(ft.to(torch.bfloat16))


def _add_cast_counts(moved: Moved, base: torch.Tensor, ft: torch.Tensor, eta: float) -> None:
    """Fill in the definitions on values rounded to bf16 (nearest, ties to even)."""
    import torch
    if moved.cast_overflow:  # finite as stored, beyond bf16's largest: changed under these definitions
        infinite = _infinite_in_bf16(base, ft)
        base, ft = base[~infinite], ft[~infinite]
    base, ft = base.to(torch.bfloat16), ft.to(torch.bfloat16)
    differ = _comparable(base.view(torch.int16)) != _comparable(ft.view(torch.int16))
    num_differ = _count(differ)
    moved.changed["bf16_bits"] = num_differ + moved.cast_overflow
    if 2 * num_differ < base.numel():
        where = _positions(differ)
        base, ft = base.index_select(0, where), ft.index_select(0, where)
    w, w_new = base.float(), ft.float()
    _, delta, relative = _deltas(w, w_new)
    over_eta, over_tolerance = _counts_above(w, w_new, delta, relative, eta)
    moved.changed["seed_formula_bf16"] = over_eta + moved.cast_overflow
    moved.changed["absolute_1e-5"] = over_tolerance + moved.cast_overflow


# --------------------------------------------------------------------------------------------------------------------
# Counting two checkpoints

def _chunks(names: list[str], base: Checkpoint, chunk_bytes: int) -> Iterator[tuple[str, int, int]]:
    """(tensor, first element, end): pieces of about ``chunk_bytes`` of one float32 end, a multiple of every block size."""
    step = max(chunk_bytes // 4 // CUDA_BLOCK_ELEMENTS, 1) * CUDA_BLOCK_ELEMENTS
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
    """Moved of every tensor in ``names``, streamed; anonymous memory: a few blocks (CPU) or chunks (CUDA) per thread."""
    from tqdm import tqdm
    width = {n: _item_bytes(base.tensors[n].dtype) + _item_bytes(ft.tensors[n].dtype) for n in names}
    items = list(_chunks(names, base, chunk_bytes))

    def measure_chunk(item: tuple[str, int, int]) -> Moved:
        name, start, end = item
        one, two = (c.flat(name)[start:end].to(device) for c in (base, ft))
        block = CUDA_BLOCK_ELEMENTS if device == "cuda" else BLOCK_BYTES // max(one.element_size(), two.element_size())
        return combine(measure_block(one[i:i + block], two[i:i + block], eta) for i in range(0, end - start, block))

    parts: dict[str, list[Moved]] = {n: [] for n in names}
    total = sum(width[n] * base.tensors[n].num_elements for n in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="compared", disable=None if progress else True) as bar:
        for moved, (name, start, end) in zip(_run_in_threads(measure_chunk, items, _worker_count(num_threads)), items):
            parts[name].append(moved)
            bar.update(width[name] * (end - start))
    return {n: combine(parts[n]).settle() for n in names}


def _item_bytes(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]


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
    shape = (ULP_BINS[1] - ULP_BINS[0] + 2, RELATIVE_BINS[1] - RELATIVE_BINS[0] + 2)
    joint = np.zeros(shape, dtype=np.int64) + moved.histogram
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
    total = math.fsum(moved.sum_abs)
    norm, base_norm, ft_norm = (math.sqrt(math.fsum(s)) for s in (moved.squares, moved.base_squares, moved.ft_squares))
    return {"max_abs": moved.max_abs, "mean_abs": total / finite if finite else None,
            "mean_abs_of_moved": total / num_moved if num_moved else None, "norm": norm, "base_norm": base_norm,
            "ft_norm": ft_norm, "relative_norm": norm / base_norm if base_norm else None}


def _group_block(moved: Moved) -> dict[str, Any]:
    return {"num_params": moved.num_params, "num_nonfinite": moved.nonfinite_either,
            "sparsity_percent": sparsity_percent(moved.changed["seed_formula_bf16"], moved.num_params),
            "definitions": definitions_block(moved), "delta": delta_block(moved)}


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


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    return {k: checkpoint.identity[k] for k in IDENTITY_KEYS if k in checkpoint.identity}


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
        **_identity(ft),
        "base_ckpt": base.label, "ft_ckpt": ft.label,
        "sparsity": {"sparsity_percent": sparsity_percent(changed, total.num_params), "num_changed": changed,
                     "num_params": total.num_params, "eta": eta},
        "definitions": definitions_block(total, with_meaning=True),
        "nonfinite": {"num_base": total.nonfinite_base, "num_ft": total.nonfinite_ft,
                      "num_either": total.nonfinite_either, "num_finite_but_infinite_in_bf16": total.cast_overflow,
                      "rule": "counted as changed under every definition (the last only under those on bf16 values)"},
        "delta": delta_block(total),
        **histogram_blocks(total),
        "by_layer": {k: _group_block(layers[k]) for k in sorted(layers, key=_layer_order)},
        "by_module_kind": {k: {**_group_block(kinds[k]), **histogram_blocks(kinds[k])} for k in KINDS if k in kinds},
        "by_layer_and_kind": {k: {"num_params": m.num_params, "num_changed": m.changed["seed_formula_bf16"],
                                  "sparsity_percent": sparsity_percent(m.changed["seed_formula_bf16"], m.num_params)}
                              for k, m in cells.items()},
        "tensors": {n: {"shape": list(base.tensors[n].shape), "base_dtype": base.tensors[n].dtype,
                        "ft_dtype": ft.tensors[n].dtype, "layer": layer_index(n), "kind": module_kind(n),
                        "num_params": m.num_params, "num_changed": dict(m.changed), "num_nonfinite": m.nonfinite_either,
                        "delta": delta_block(m)} for n, m in measured.items()},
        "dtypes": {end: sorted({c.tensors[n].dtype for n in measured}) for end, c in (("base", base), ("ft", ft))},
        "tied": tied, "missing": pairing.missing,
        "skipped_not_parameters": sorted(set(base.skipped) | set(ft.skipped)),
    }


def compare_checkpoints(base_ckpt: str | Path, ft_ckpt: str | Path, eta: float = DEFAULT_ETA, *, device: str = "cpu",
                        allow_missing: bool = False, chunk_bytes: int = CHUNK_BYTES, num_threads: int = 0,
                        geometry: dict[str, Any] | None = None, progress: bool = False) -> dict[str, Any]:
    """Which weights differ between two checkpoints: the content of ``{run}_sparsity.json``.

    Args:    base_ckpt, ft_ckpt: folder, safetensors file or hub id; float formats may differ between the ends.
             eta: relative tolerance of the seed formula. device: "cpu", "cuda" or "auto".
             allow_missing: compare what both ends hold and count the rest, instead of raising.
             geometry: keyword arguments of geometry_report (may be empty) to add its block, None for none.
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
    num_bytes = sum(c.tensors[n].num_elements * _item_bytes(c.tensors[n].dtype) for n in pairing.names for c in (base, ft))
    seconds = time.perf_counter() - started
    report["run_cost"] = {"seconds": seconds, "bytes_compared": num_bytes, "device": device,
                          "gigabytes_per_second": num_bytes / 1e9 / seconds, "threads": _worker_count(num_threads)}
    if geometry is not None:
        report["geometry"] = geometry_report(base, ft, pairing.names, eta=eta, device=device, progress=progress,
                                             **geometry)
    return report


def _check_eta(eta: float) -> None:
    if not 0.0 <= eta < 1.0:
        raise UserError(f"--eta {eta}: must be at least 0 and below 1 (the default {DEFAULT_ETA} is equality on bf16 values)")


# --------------------------------------------------------------------------------------------------------------------
# Geometry of one matrix's update

@dataclass
class TopSingular:
    """The largest singular triplets of a matrix A: A v_i is u_i s_i up to ``residual``.

    u: (m, c), s: (c,) descending, v: (n, c), float64. method: "exact" or "randomised".
    all_values: every singular value (exact only).
    """

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor
    method: str
    all_values: torch.Tensor | None


def top_singular(matrix: torch.Tensor, count: int, exact_max_dim: int = EXACT_SVD_MAX_DIM) -> TopSingular:
    """The ``count`` largest singular triplets of ``matrix``, (m, n) float64; all where min(m, n) <= exact_max_dim.

    Larger ones: randomised subspace iteration with a fixed seed, SVD_OVERSAMPLING extra columns and SVD_ITERATIONS passes.
    Its accuracy is not assumed: see decomposition_error.
    Source: Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1.
    """
    import torch
    if min(matrix.shape) <= exact_max_dim:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return TopSingular(u, s, vh.mT, "exact", s)
    generator = torch.Generator().manual_seed(SVD_SEED)  # one test matrix for both ends, so that their errors are alike
    columns = min(count + SVD_OVERSAMPLING, *matrix.shape)
    basis = torch.randn(matrix.shape[1], columns, generator=generator, dtype=torch.float64).to(matrix.device)
    basis = torch.linalg.qr(matrix @ basis).Q
    for _ in range(SVD_ITERATIONS):
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    u, s, vh = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    return TopSingular(basis @ u, s, vh.mT, "randomised", None)


def spectral_norm(matrix: torch.Tensor, u: torch.Tensor | None = None, v: torch.Tensor | None = None) -> float:
    """Largest singular value of (I - u u^T) matrix (I - v v^T), by block power iteration (an estimate from below)."""
    import torch
    def without(basis: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        return x if basis is None else x - basis @ (basis.mT @ x)
    generator = torch.Generator().manual_seed(SVD_SEED + 1)
    x = torch.randn(matrix.shape[1], min(NORM_COLUMNS, *matrix.shape), generator=generator, dtype=torch.float64)
    x = torch.linalg.qr(without(v, x.to(matrix.device))).Q
    for _ in range(NORM_ITERATIONS):
        y = without(u, matrix @ without(v, x))
        x = torch.linalg.qr(without(v, matrix.mT @ y)).Q
    return float(torch.linalg.matrix_norm(without(u, matrix @ without(v, x)), 2))


@dataclass
class DecompositionError:
    """What is known about the error of rank-k triplets.

    values: largest error of a singular value. next_value: upper estimate of s_(k+1).
    sine: bound on the sine of the angle between computed and true subspaces (None: no gap to speak of).
    """

    values: float
    next_value: float
    sine: float | None


def decomposition_error(matrix: torch.Tensor, top: TopSingular, k: int) -> DecompositionError:
    """A-posteriori error of the first k triplets.

    Exact: rounding, 16 eps s_1. Randomised: with E = A V - U S (A^T U = V S holds to rounding) and M = A outside both
    subspaces, A is diag(S, M) plus E in orthonormal bases, so values are off by at most ||E|| (Weyl) and sines by
    ||E|| / (s_k - ||M|| - ||E||) (Wedin). ||M|| is a power-iteration estimate raised by NORM_SAFETY.
    """
    import torch
    rounding = 16 * torch.finfo(torch.float64).eps * float(top.s[0])
    if top.method == "exact":
        error, next_value = rounding, float(top.s[k]) if k < len(top.s) else 0.0
    else:
        u, s, v = top.u[:, :k], top.s[:k], top.v[:, :k]
        error = rounding + float(torch.linalg.matrix_norm(matrix @ v - u * s, 2))
        next_value = NORM_SAFETY * max(spectral_norm(matrix, u, v), float(top.s[k]) if k < len(top.s) else 0.0)
    gap = float(top.s[k - 1]) - next_value - error
    sine = error / gap if gap > error else None
    return DecompositionError(error, next_value, sine)


def principal_rank(singular_values: torch.Tensor, energy: float) -> int:
    """Default k: the leading values that hold half of ||W||_F^2, moved to the widest relative gap within a quarter of k.

    Args:    singular_values: descending, all or the leading ones. energy: ||W||_F^2.
    Returns: k, from 1 to MAX_PRINCIPAL_RANK, below the number of values given. The move matters: a subspace cut through a
             cluster of equal values is not defined, and its angles would measure nothing.
    """
    import torch
    last = len(singular_values) - 1
    held = torch.cumsum(singular_values ** 2, 0)
    center = min(int((held < PRINCIPAL_ENERGY * energy).sum()) + 1, last, MAX_PRINCIPAL_RANK)
    low, high = max(1, math.ceil(0.75 * center)), min(max(last, 1), MAX_PRINCIPAL_RANK, math.floor(1.25 * center))
    if high <= low:
        return max(1, min(center, high))
    above, below = singular_values[low - 1:high], singular_values[low:high + 1]
    return low + int(((above - below) / above.clamp_min(1e-300)).argmax())  # the clamp only keeps 0 / 0 out


def principal_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angles between two subspaces, ascending, in radians.

    Args:    first, second: (n, k) float64, orthonormal columns.
    Returns: (k,). Sines below 45 degrees and cosines above: arccos near 1 would lose half of the digits.
    Source:  Bjorck and Golub 1973.
    """
    import torch
    product = first.mT @ second
    cosines = torch.linalg.svdvals(product).clamp(max=1.0)
    sines = torch.linalg.svdvals(second - first @ product).clamp(max=1.0).flip(0)
    return torch.where(cosines ** 2 > 0.5, torch.asin(sines), torch.acos(cosines))


def changed_mask(base: torch.Tensor, ft: torch.Tensor, eta: float = DEFAULT_ETA) -> torch.Tensor:
    """Update mask: True where the seed formula on both ends cast to bf16 says changed; non-finite is changed."""
    import torch
    w, w_new = (x.to(torch.bfloat16).double() for x in (base, ft))
    changed = (w_new - w).abs() > eta * torch.maximum(w.abs(), w_new.abs())
    return changed | ~torch.isfinite(w) | ~torch.isfinite(w_new)


def largest_share(values: torch.Tensor, alpha: float) -> torch.Tensor:
    """True on the share ``alpha`` of largest values. Ties at the threshold are all in: the density can exceed alpha."""
    import torch
    count = min(max(round(alpha * values.numel()), 1), values.numel())
    threshold = torch.kthvalue(values.flatten(), values.numel() - count + 1).values
    return values >= threshold


def mask_overlap(mask: torch.Tensor, update: torch.Tensor) -> dict[str, Any]:
    """|mask & update| / |update|, its level for an update placed at random (the density of ``mask``), and the z score."""
    total, inside, moved = mask.numel(), _count(mask), _count(update)
    chance = inside / total
    if moved == 0:
        return {"overlap": None, "chance": chance, "z": None, "reason": "no weight of this matrix changed"}
    overlap = _count(mask & update) / moved
    # hypergeometric: |update| of the total drawn without replacement
    spread = math.sqrt(chance * (1 - chance) * (total - moved) / ((total - 1) * moved)) if total > 1 else 0.0
    return {"overlap": overlap, "chance": chance, "z": (overlap - chance) / spread if spread else None}


def concentration(counts: torch.Tensor, size: int) -> dict[str, Any]:
    """How unevenly changed weights lie over rows (or columns).

    Args:    counts: (r,) changed weights per row. size: weights per row.
    Returns: gini of the counts, share in the fullest tenth, and both for a mask placed at random (normal approximation
             of the binomial counts); None where nothing changed.
    """
    import torch
    counts = torch.sort(counts.double()).values
    total, rows = float(counts.sum()), len(counts)
    if total == 0:
        return {"gini": None, "gini_chance": None, "top_tenth": None, "top_tenth_chance": None,
                "reason": "no weight of this matrix changed"}
    position = torch.arange(1, rows + 1, dtype=torch.float64, device=counts.device)
    gini = float((2 * position - rows - 1) @ counts) / (rows * total)
    tenth = max(rows // 10, 1)
    mean = total / rows
    relative_sd = math.sqrt(max(1 - mean / size, 0.0) / mean)  # of a binomial count
    # E|X - X'| / (2 mean) of two normals is sd / (mean sqrt(pi)); the mean above the 90th percentile is 1.755 sd higher.
    return {"gini": gini, "gini_chance": relative_sd / math.sqrt(math.pi),
            "top_tenth": float(counts[-tenth:].sum()) / total,
            "top_tenth_chance": min(tenth / rows * (1 + 1.755 * relative_sd), 1.0)}


def matrix_geometry(base: torch.Tensor, ft: torch.Tensor, rank: int = 0, alpha: float = 0.5, eta: float = DEFAULT_ETA,
                    exact_max_dim: int = EXACT_SVD_MAX_DIM) -> dict[str, Any]:
    """Geometry of the update of one 2-D weight, computed in float64 on the stored values.

    Args:    base, ft: (m, n), any float format. rank: k of the principal subspaces, 0 for principal_rank. alpha: share of
             entries in the principal mask (largest of W's rank-k reconstruction) and low-magnitude mask (smallest |W|).
    Returns: dict of plain values; angles in degrees. None with a reason where a quantity is not defined or not known.
    Source:  arXiv 2511.08567 (spectral shift, rotation, masks); Roy and Vetterli 2007 (effective rank).
    """
    import torch
    w, w_new = base.double(), ft.double()
    if min(w.shape) < 2:
        return {"reason": "a side of length 1 has no subspace to rotate"}
    if not bool(torch.isfinite(w).all() & torch.isfinite(w_new).all()):
        return {"reason": "the matrix holds NaN or infinities"}
    energy = float(torch.sum(w * w))
    if energy == 0.0:
        return {"reason": "the base matrix is zero"}
    limit = min(w.shape) - 1
    wanted = min(rank, limit) if rank else min(MAX_PRINCIPAL_RANK, limit)
    before, after = (top_singular(x, wanted, exact_max_dim) for x in (w, w_new))
    k = wanted if rank else principal_rank(before.s, energy)
    error, error_new = decomposition_error(w, before, k), decomposition_error(w_new, after, k)

    s, s_new = before.s[:k], after.s[:k]
    delta = w_new - w
    update_norm = float(torch.linalg.matrix_norm(delta))
    update_spectrum = torch.linalg.svdvals(delta) if before.method == "exact" else None
    update_norm_2 = float(update_spectrum[0]) if update_spectrum is not None else spectral_norm(delta)
    gap = float(s[-1]) - error.next_value
    left, right = (torch.rad2deg(principal_angles(a[:, :k], b[:, :k])).tolist()
                   for a, b in ((before.u, after.u), (before.v, after.v)))
    known = error.sine is not None and error_new.sine is not None
    mask = changed_mask(base, ft, eta)
    reconstruction = (before.u[:, :k] * s) @ before.v[:, :k].mT
    s_norm = float(torch.linalg.vector_norm(s))
    result = {
        "method": before.method, "rank": k, "rank_energy_share": float(torch.sum(s * s)) / energy,
        "relative_gap": gap / float(s[-1]),
        "spectral_shift": None, "spectral_shift_at_most": update_norm / math.sqrt(energy),  # Mirsky
        "spectral_shift_top_k": float(torch.linalg.vector_norm(s_new - s)) / s_norm,
        "spectral_shift_top_k_error": math.sqrt(k) * (error.values + error_new.values) / s_norm,
        "max_left_angle_deg": left[-1], "max_right_angle_deg": right[-1],
        "mean_left_angle_deg": math.fsum(left) / k, "mean_right_angle_deg": math.fsum(right) / k,
        "angle_sine_error": error.sine + error_new.sine if known else None,
        "wedin_sine_at_most": min(update_norm_2 / gap, 1.0) if gap > 0 else None,
        "left_angles_deg": left, "right_angles_deg": right,
        "update_density": _count(mask) / mask.numel(),
        "principal_mask": mask_overlap(largest_share(reconstruction.abs_(), alpha), mask),
        "low_magnitude_mask": mask_overlap(largest_share(-w.abs(), alpha), mask),
        "rows": concentration(mask.sum(1), mask.shape[1]), "columns": concentration(mask.sum(0), mask.shape[0]),
        "update_norm": update_norm, "update_norm_2": update_norm_2,
        "update_stable_rank": (update_norm / update_norm_2) ** 2 if update_norm_2 else None,
        "update_effective_rank": None, "update_numerical_rank_share": None,
    }
    if not known:
        result["angle_sine_error_reason"] = "no gap between the k-th and the next singular value at this accuracy"
    if update_spectrum is not None:
        result["spectral_shift"] = float(torch.linalg.vector_norm(after.s - before.s)) / math.sqrt(energy)
        result["spectral_shift_error"] = math.sqrt(len(before.s) / energy) * (error.values + error_new.values)
        if update_norm_2:
            share = update_spectrum / update_spectrum.sum()
            result["update_effective_rank"] = float(torch.exp(-torch.special.xlogy(share, share).sum()))
            tolerance = max(w.shape) * torch.finfo(torch.float32).eps * update_norm_2
            result["update_numerical_rank_share"] = _count(update_spectrum > tolerance) / min(w.shape)
        else:
            result["update_rank_reason"] = "the update is zero"
    else:
        result["update_rank_reason"] = result["spectral_shift_reason"] = (
            "needs every singular value; raise --exact_svd_max_dim to decompose this size exactly")
    return result


def geometry_report(base: Checkpoint, ft: Checkpoint, names: list[str], *, rank: int = 0, alpha: float = 0.5,
                    eta: float = DEFAULT_ETA, layers: list[int] | None = None, exact_max_dim: int = EXACT_SVD_MAX_DIM,
                    device: str = "cpu", progress: bool = False) -> dict[str, Any]:
    """matrix_geometry of every 2-D weight in ``layers`` (None or empty: all, with what lies outside the layers)."""
    from tqdm import tqdm
    if rank < 0 or not 0.0 < alpha < 1.0 or exact_max_dim < 0:
        raise UserError(f"--rank {rank}, --alpha {alpha}, --exact_svd_max_dim {exact_max_dim}: rank and size are at least "
                        "0, alpha lies between 0 and 1")
    matrices = [n for n in names if len(base.tensors[n].shape) == 2]
    if layers:
        present = sorted({layer_index(n) for n in matrices} - {None})
        if unknown := sorted(set(layers) - set(present)):
            there = f"{present[0]} to {present[-1]}" if present else "none with a number"
            raise UserError(f"--layers {unknown[0]}: no such layer (there are {there})")
        matrices = [n for n in matrices if layer_index(n) in layers]
    if not matrices:
        raise UserError("--geometry: no 2-D weight to measure")
    results = {}
    total = sum(base.tensors[n].num_elements for n in matrices)
    with tqdm(total=total, unit="w", unit_scale=True, desc="geometry", disable=None if progress else True) as bar:
        for name in matrices:
            stored = base.tensors[name]
            w, w_new = (c.flat(name).reshape(stored.shape).to(device) for c in (base, ft))
            results[name] = {"layer": layer_index(name), "kind": module_kind(name), "shape": list(stored.shape),
                             **matrix_geometry(w, w_new, rank, alpha, eta, exact_max_dim)}
            bar.update(stored.num_elements)
    return {"settings": {"rank": rank or None, "rank_rule": "given" if rank else principal_rank.__doc__.split("\n")[0],
                         "alpha": alpha, "eta": eta, "exact_svd_max_dim": exact_max_dim,
                         "update_mask": DEFINITIONS["seed_formula_bf16"]},
            "matrices": results, "by_module_kind": _geometry_means(results)}


GEOMETRY_MEANS = ("spectral_shift", "spectral_shift_top_k", "max_left_angle_deg", "max_right_angle_deg",
                  "update_density", "update_effective_rank", "update_stable_rank")


def _geometry_means(results: dict[str, dict]) -> dict[str, dict]:
    """Plain means over the matrices of a kind, None where no matrix has the quantity."""
    def mean(values: list) -> float | None:
        known = [v for v in values if v is not None]
        return math.fsum(known) / len(known) if known else None
    means = {}
    for kind in KINDS:
        rows = [r for r in results.values() if r["kind"] == kind and "method" in r]
        if not rows:
            continue
        means[kind] = {"num_matrices": len(rows), **{key: mean([r[key] for r in rows]) for key in GEOMETRY_MEANS}}
        for key in ("principal_mask", "low_magnitude_mask"):
            means[kind][key] = {part: mean([r[key][part] for r in rows]) for part in ("overlap", "chance")}
        for key in ("rows", "columns"):
            means[kind][key] = {part: mean([r[key][part] for r in rows]) for part in ("gini", "gini_chance")}
    return means


# --------------------------------------------------------------------------------------------------------------------
# Several runs, and one run over time

@dataclass
class MaskCounts:
    """Update masks of R runs over one tensor: sizes of pairwise intersections, and how many runs changed an element."""

    num_params: int
    both: Any                      # (R, R) int64; the diagonal is each mask's size
    changed_by: Any                # (R + 1,) int64: elements changed by exactly 0, 1, ..., R runs


def _mask_counts(base: Checkpoint, runs: list[Checkpoint], names: list[str], eta: float, device: str, chunk_bytes: int,
                 num_threads: int, progress: bool) -> dict[str, MaskCounts]:
    import torch
    from tqdm import tqdm
    items = list(_chunks(names, base, chunk_bytes))

    def count_chunk(item: tuple[str, int, int]) -> tuple[Any, Any]:
        name, start, end = item
        both = torch.zeros(len(runs), len(runs), dtype=torch.int64)
        changed_by = torch.zeros(len(runs) + 1, dtype=torch.int64)
        pieces = [c.flat(name)[start:end].to(device) for c in (base, *runs)]
        for i in range(0, end - start, MASK_BLOCK_ELEMENTS):
            w, *others = (x[i:i + MASK_BLOCK_ELEMENTS] for x in pieces)
            masks = torch.stack([changed_mask(w, other, eta) for other in others])
            changed_by += torch.bincount(masks.sum(0), minlength=len(runs) + 1).cpu()
            masks = masks.float()  # a block has fewer than 2^24 elements: float32 counts them exactly
            both += (masks @ masks.mT).long().cpu()
        return both, changed_by

    sums: dict[str, MaskCounts] = {}
    total = sum(base.tensors[n].num_elements for n in names)
    with tqdm(total=total, unit="w", unit_scale=True, desc="masks", disable=None if progress else True) as bar:
        results = _run_in_threads(count_chunk, items, _worker_count(num_threads))
        for (both, changed_by), (name, start, end) in zip(results, items):
            before = sums.get(name, MaskCounts(0, 0, 0))
            sums[name] = MaskCounts(before.num_params + end - start, before.both + both, before.changed_by + changed_by)
            bar.update(end - start)
    return sums


def jaccard_block(counts: list[MaskCounts]) -> dict[str, Any]:
    """Overlap of the runs' masks over some tensors, beside its level for masks placed at random.

    Returns: (R x R) tables of jaccard = |A & B| / |A or B| and overlap_of_row = |A & B| / |A|; chance levels
             pq / (p + q - pq) from the densities over all these tensors (`jaccard_chance`, the paper's) and with each
             tensor's own densities (`jaccard_chance_by_tensor`, which does not call "the same layers are busy" an
             overlap); consensus: elements changed by 0..R runs, and the same for independent masks of these densities.
    """
    import torch
    total = sum(c.num_params for c in counts)
    both = sum(c.both for c in counts).double()
    changed_by = sum(c.changed_by for c in counts).tolist()
    runs = both.shape[0]
    sizes = both.diagonal()
    own_sizes = [c.both.diagonal().double() for c in counts]
    expected = sum(torch.outer(d, d) / c.num_params for d, c in zip(own_sizes, counts))

    def ratio(top: float, bottom: float) -> float | None:
        return top / bottom if bottom else None
    def table(cell: Callable[[int, int], float | None]) -> list[list[float | None]]:
        return [[cell(i, j) for j in range(runs)] for i in range(runs)]
    def jaccard(joint: torch.Tensor) -> list[list[float | None]]:
        return table(lambda i, j: ratio(float(joint[i, j]), float(sizes[i] + sizes[j] - joint[i, j])))
    plain = sizes[:, None] * sizes[None, :] / total
    block = {"num_params": total, "density": (sizes / total).tolist(), "jaccard": jaccard(both),
             "jaccard_chance": jaccard(plain), "jaccard_chance_by_tensor": jaccard(expected),
             "overlap_of_row": table(lambda i, j: ratio(float(both[i, j]), float(sizes[i])))}
    known = [(i, j) for i in range(runs) for j in range(runs) if i != j and block["jaccard"][i][j] is not None]
    for name in ("jaccard", "jaccard_chance", "jaccard_chance_by_tensor"):
        pairs = [block[name][i][j] for i, j in known]
        block[f"mean_{name}"] = math.fsum(pairs) / len(pairs) if pairs else None
    if block["mean_jaccard"] is None:
        block["reason"] = "no weight changed in any pair of runs"
    chance = [1.0]
    for density in block["density"]:  # Poisson-binomial: one run more each time
        chance = [(chance[i] if i < len(chance) else 0.0) * (1 - density) + (chance[i - 1] if i else 0.0) * density
                  for i in range(len(chance) + 1)]
    moved = sum(changed_by[1:])
    block["consensus"] = {"num_changed_by": changed_by, "num_changed_by_chance": [p * total for p in chance],
                          "share_of_moved_changed_by_all": ratio(changed_by[-1], moved),
                          "mean_ratio_where_moved": ratio(sum(i * c for i, c in enumerate(changed_by)), runs * moved)}
    return block


def compare_runs(base_ckpt: str | Path, run_ckpts: list[str | Path], eta: float = DEFAULT_ETA, *, device: str = "cpu",
                 allow_missing: bool = False, chunk_bytes: int = CHUNK_BYTES, num_threads: int = 0,
                 progress: bool = False) -> dict[str, Any]:
    """How far the update masks of several runs from one base agree, in total, per module kind and per tensor kind.

    Args:    run_ckpts: two or more checkpoints; the rest as compare_checkpoints.
    Returns: {runs, total, by_module_kind}; see jaccard_block.
    Source:  arXiv 2511.08567 Table 2 (Jaccard, consensus ratio); arXiv 2505.11711 (overlap_of_row).
    """
    _check_eta(eta)
    if len(run_ckpts) < 2:
        raise UserError("--compare needs two or more checkpoints")
    device = _pick_device(device)
    base = open_checkpoint(str(base_ckpt), "--base_ckpt")
    runs = [open_checkpoint(str(c), "--compare") for c in run_ckpts]
    drop_tied_copies([base, *runs])
    pairings = [pair_tensors(base, run, allow_missing) for run in runs]
    names = sorted(set.intersection(*(set(p.names) for p in pairings)))
    if not names:
        raise UserError("--compare: no tensor is in every checkpoint")
    counts = _mask_counts(base, runs, names, eta, device, chunk_bytes, num_threads, progress)
    by_kind = {kind: [c for n, c in counts.items() if module_kind(n) == kind] for kind in KINDS}
    return {"base_ckpt": base.label, "eta": eta, "update_mask": DEFINITIONS["seed_formula_bf16"],
            "runs": [{"ft_ckpt": c.label, **_identity(c)} for c in runs],
            "missing": [p.missing for p in pairings] if allow_missing else None,
            "total": jaccard_block(list(counts.values())),
            "by_module_kind": {kind: jaccard_block(rows) for kind, rows in by_kind.items() if rows}}


def trajectory(base_ckpt: str | Path, run_dir: str | Path, eta: float = DEFAULT_ETA, *, device: str = "cpu",
               allow_missing: bool = False, chunk_bytes: int = CHUNK_BYTES, num_threads: int = 0,
               progress: bool = False) -> dict[str, Any]:
    """Sparsity against step, from the checkpoints a run kept and its final model.

    Args:    run_dir: folder with ``checkpoints/step_*`` and ``final_model`` (either may be absent).
    Returns: {run, points: [{name, step, sparsity_percent, definitions, vs_previous}]}, by step; ``vs_previous`` compares
             with the point before (the first: with the base). final_model has the step of rlvr_run.json, else null.
    """
    _check_eta(eta)
    device, run_dir = _pick_device(device), Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"--trajectory {run_dir}: no such folder")
    steps = [p for p in (run_dir / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    folders = sorted(steps, key=_step_of) + [p for p in [run_dir / "final_model"] if p.is_dir()]
    if not folders:
        raise UserError(f"--trajectory {run_dir}: holds neither checkpoints/step_* nor final_model")
    points, previous = [], None
    for folder in folders:
        base, ft = open_checkpoint(str(base_ckpt), "--base_ckpt"), open_checkpoint(str(folder), "--trajectory")
        before = previous and open_checkpoint(str(previous), "--trajectory")
        drop_tied_copies([base, ft] + ([before] if before else []))
        names = pair_tensors(base, ft, allow_missing).names
        options = dict(eta=eta, device=device, chunk_bytes=chunk_bytes, num_threads=num_threads, progress=progress)
        moved = combine(measure_tensors(base, ft, names, **options).values())
        since = combine(measure_tensors(before, ft, names, **options).values()) if before else moved
        points.append({"name": folder.name, "step": _step_of(folder) if folder in steps else ft.identity.get("step"),
                       "sparsity_percent": sparsity_percent(moved.changed["seed_formula_bf16"], moved.num_params),
                       "num_params": moved.num_params, "definitions": definitions_block(moved),
                       "delta": delta_block(moved), "vs_previous": {"name": previous.name if previous else "base",
                                                                    "definitions": definitions_block(since)}})
        previous = folder
    return {"run": str(run_dir), "base_ckpt": str(base_ckpt), "eta": eta, "points": points}


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


# --------------------------------------------------------------------------------------------------------------------
# Figures

def write_plots(report: dict[str, Any], folder: str | Path) -> list[Path]:
    """Draw every figure that ``report`` has the numbers for; returns the files. WorkError when one cannot be written."""
    folder = require_writable_dir(folder)
    drawn = []
    for name, draw, needed in (("sparsity_by_layer", _draw_sparsity_by_layer, "by_layer_and_kind"),
                               ("ulp_histogram", _draw_ulp_histogram, "ulp_histogram"),
                               ("principal_angles", _draw_principal_angles, "geometry"),
                               ("mask_overlap", _draw_mask_overlap, "geometry"),
                               ("mask_jaccard", _draw_mask_jaccard, "compare"),
                               ("sparsity_vs_step", _draw_sparsity_vs_step, "trajectory")):
        if report.get(needed):
            drawn.append(_save_figure(draw(report), folder / f"{name}.png"))
    return drawn


def _new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt.subplots(1, columns, figsize=(width, height), constrained_layout=True, squeeze=False)


def _save_figure(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt
    try:
        with atomic_path(path) as aside:
            figure.savefig(aside, dpi=110, format="png")
    except OSError as error:
        raise WorkError(f"plot {path} cannot be written: {error.strerror or error}") from None
    finally:
        plt.close(figure)
    return path


def _title(report: dict[str, Any]) -> str:
    parts = [f"{key} {report[key]}" for key in ("arm", "seed") if key in report]
    return ", ".join(parts) or Path(str(report.get("ft_ckpt", ""))).name


def _heat_map(axis: Any, grid: Any, rows: list[str], columns: list[str], label: str, value_format: str) -> None:
    """Labelled cells; numbers are printed while they fit. NaN cells stay blank."""
    import numpy as np
    grid = np.ma.masked_invalid(np.asarray(grid, dtype=float))
    low, high = (float(grid.min()), float(grid.max())) if grid.count() else (0.0, 1.0)
    image = axis.imshow(grid, aspect="auto", cmap="viridis", vmin=low, vmax=high if high > low else low + 1e-9)
    axis.set_yticks(range(len(rows)), rows)
    stride = max(len(columns) // 28, 1)
    axis.set_xticks(range(0, len(columns), stride), columns[::stride])
    if len(columns) <= 16:
        for i, j in zip(*np.nonzero(~np.ma.getmaskarray(grid))):
            color = "white" if grid[i, j] - low < 0.6 * (high - low) else "black"
            axis.text(j, i, format(grid[i, j], value_format), ha="center", va="center", fontsize=8, color=color)
    axis.figure.colorbar(image, ax=axis, label=label)


def _draw_sparsity_by_layer(report: dict[str, Any]) -> Any:
    cells = report["by_layer_and_kind"]
    layers = sorted({key.split("/")[0] for key in cells}, key=_layer_order)
    kinds = [k for k in KINDS if any(key.endswith(f"/{k}") for key in cells)]
    grid = [[_or_nan(cells.get(f"{layer}/{kind}", {}).get("sparsity_percent")) for layer in layers] for kind in kinds]
    figure, axes = _new_figure(min(4 + 0.55 * len(layers), 16), 1.5 + 0.42 * len(kinds))
    _heat_map(axes[0, 0], grid, kinds, layers, "unchanged weights, %", ".1f")
    axes[0, 0].set(xlabel="layer", title=f"bf16-aware update sparsity: {_title(report)}")
    return figure


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _draw_ulp_histogram(report: dict[str, Any]) -> Any:
    histogram = report["ulp_histogram"]
    total = sum(histogram["counts"]) + histogram["num_equal"]
    low, high = ULP_BINS
    labels = ["0", f"<2^{low}"] + [f"2^{e}" for e in range(low, high)] + [f">=2^{high}"]
    shares = [100 * c / total if total else 0.0 for c in [histogram["num_equal"], *histogram["counts"]]]
    figure, axes = _new_figure(10, 4)
    axis = axes[0, 0]
    below_half = 1 + sum(edge < 0.5 for edge in histogram["bin_lower_edges"])
    colors = ["0.6"] + ["tab:orange"] * (below_half - 1) + ["tab:blue"] * (len(shares) - below_half)
    axis.bar(range(len(shares)), shares, color=colors)
    axis.axvline(below_half - 0.5, color="black", linestyle="--", linewidth=1)
    axis.annotate("half an ULP", (below_half - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3),
                  textcoords="offset points", va="top", fontsize=9, backgroundcolor=(1, 1, 1, 0.7))
    axis.set_xticks(range(0, len(labels), 2), labels[::2], rotation=45)
    axis.set(xlabel="|w' - w| / ULP of bf16 at w (lower edge of the bin; 0: equal)", ylabel="share of all weights, %",
             title=f"Size of the update on the bf16 grid: {_title(report)}")
    return figure


def _by_kind_and_layer(report: dict[str, Any]) -> dict[str, list[tuple[int, dict]]]:
    """Measured matrices per kind, by layer; those outside the layers come at -1."""
    rows: dict[str, list[tuple[int, dict]]] = {}
    for matrix in report["geometry"]["matrices"].values():
        if "method" in matrix:
            rows.setdefault(matrix["kind"], []).append((-1 if matrix["layer"] is None else matrix["layer"], matrix))
    return {kind: sorted(rows[kind], key=lambda r: r[0]) for kind in KINDS if kind in rows}


def _draw_principal_angles(report: dict[str, Any]) -> Any:
    figure, axes = _new_figure(11, 4.2, 2)
    for axis, side in zip(axes[0], ("left", "right")):
        for kind, rows in _by_kind_and_layer(report).items():
            angles = [m[f"max_{side}_angle_deg"] for _, m in rows]
            axis.plot([x for x, _ in rows], angles, marker="o", markersize=4, label=kind)
        axis.set(xlabel="layer (-1: outside the layers)", ylabel="largest principal angle, degrees",
                 title=f"{side} singular subspace")
        axis.set_ylim(bottom=0)
    axes[0, 1].legend(fontsize=8, ncols=2)
    figure.suptitle(f"Rotation of the principal subspaces: {_title(report)}")
    return figure


def _draw_mask_overlap(report: dict[str, Any]) -> Any:
    figure, axes = _new_figure(11, 4.2, 2)
    for axis, key in zip(axes[0], ("principal_mask", "low_magnitude_mask")):
        for kind, rows in _by_kind_and_layer(report).items():
            known = [(x, m[key]["overlap"] - m[key]["chance"]) for x, m in rows if m[key]["overlap"] is not None]
            axis.plot([x for x, _ in known], [y for _, y in known], marker="o", markersize=4, label=kind)
        axis.axhline(0, color="black", linestyle="--", linewidth=1)
        axis.set(xlabel="layer (-1: outside the layers)", ylabel="overlap minus chance", title=key.replace("_", " "))
    axes[0, 1].legend(fontsize=8, ncols=2)
    figure.suptitle(f"Where the changed weights lie: {_title(report)}")
    return figure


def _draw_mask_jaccard(report: dict[str, Any]) -> Any:
    compare = report["compare"]
    labels = [f"{r['arm']} s{r['seed']}" if "arm" in r and "seed" in r else f"{i + 1}: {Path(r['ft_ckpt']).name}"
              for i, r in enumerate(compare["runs"])]
    figure, axes = _new_figure(12, 4.6, 2)
    table = compare["total"]["jaccard"]
    grid = [[_or_nan(v) if i != j else math.nan for j, v in enumerate(row)] for i, row in enumerate(table)]
    _heat_map(axes[0, 0], grid, labels, labels, "Jaccard overlap of update masks", ".3f")
    axes[0, 0].tick_params(axis="x", rotation=30)
    kinds = [k for k, b in compare["by_module_kind"].items() if b["mean_jaccard"] is not None]
    for offset, (key, label) in enumerate((("mean_jaccard", "measured"), ("mean_jaccard_chance_by_tensor", "chance"))):
        heights = [compare["by_module_kind"][k][key] for k in kinds]
        axes[0, 1].bar([i + 0.4 * offset for i in range(len(kinds))], heights, 0.38, label=label)
    axes[0, 1].set_xticks([i + 0.2 for i in range(len(kinds))], kinds, rotation=30)
    axes[0, 1].set(ylabel="mean Jaccard over pairs of runs", title="by module kind")
    axes[0, 1].legend()
    return figure


def _draw_sparsity_vs_step(report: dict[str, Any]) -> Any:
    points = report["trajectory"]["points"]
    steps = [p["step"] for p in points if p["step"] is not None]
    if points[-1]["step"] in (None, *steps[:-1]):  # final_model: the newest checkpoint again, unless it has its own step
        points = points[:-1] if steps else points
    steps = [p["step"] or 0 for p in points]
    figure, axes = _new_figure(8, 4.4)
    axis = axes[0, 0]
    def line(definitions: list[dict], name: str, style: str, **look: Any) -> None:
        axis.plot(steps, [d[name]["sparsity_percent"] for d in definitions], style, markersize=5, **{"label": name, **look})
    since_base = [p["definitions"] for p in points]
    for name, style in (("seed_formula_bf16", "o-"), ("seed_formula_stored", "s--"), ("exact_stored", "^:"),
                        ("absolute_1e-5", "x-.")):
        line(since_base, name, style)
    line([p["vs_previous"]["definitions"] for p in points], "seed_formula_bf16", "d-", color="0.6",
         label="seed_formula_bf16, since the point before")
    axis.set(xlabel="step", ylabel="unchanged weights, %",
             title=f"Sparsity against step: {Path(report['trajectory']['run']).name}")
    axis.legend(fontsize=8)
    return figure


# --------------------------------------------------------------------------------------------------------------------

def main(cfg: SparsityConfig) -> None:
    check_request(cfg)
    options = {"eta": cfg.eta, "device": cfg.device, "allow_missing": cfg.allow_missing,
               "chunk_bytes": cfg.chunk_mib << 20, "num_threads": cfg.num_threads, "progress": True}
    report: dict[str, Any] = {"base_ckpt": cfg.base_ckpt}
    if cfg.ft_ckpt:
        geometry = {"rank": cfg.rank, "alpha": cfg.alpha, "layers": cfg.layers, "exact_max_dim": cfg.exact_svd_max_dim}
        report = compare_checkpoints(cfg.base_ckpt, cfg.ft_ckpt, geometry=geometry if cfg.geometry else None, **options)
    if cfg.compare:
        report["compare"] = compare_runs(cfg.base_ckpt, cfg.compare, **options)
    if cfg.trajectory:
        report["trajectory"] = trajectory(cfg.base_ckpt, cfg.trajectory, **options)
    report["versions"] = package_versions(("torch", "numpy", "safetensors"))
    write_json(cfg.output_path, report)
    print_summary(report)
    print(f"written: {cfg.output_path}")
    if cfg.plots:
        print("plots:  ", *write_plots(report, cfg.plots))


def check_request(cfg: SparsityConfig) -> None:
    """UserError for a request that cannot be right, before any weight is read."""
    for name in ("base_ckpt", "output_path"):
        if getattr(cfg, name) is None:
            raise UserError(f"--{name} is required")
    if not (cfg.ft_ckpt or cfg.compare or cfg.trajectory):
        raise UserError("nothing to compare: give --ft_ckpt, --compare or --trajectory")
    if cfg.geometry and not cfg.ft_ckpt:
        raise UserError("--geometry needs --ft_ckpt")
    if cfg.chunk_mib < 1 or cfg.num_threads < 0:
        raise UserError(f"--chunk_mib {cfg.chunk_mib}, --num_threads {cfg.num_threads}: at least 1 and at least 0")
    if Path(cfg.output_path).is_dir():
        raise UserError(f"--output_path {cfg.output_path} is a folder; name a JSON file")
    for folder in (Path(cfg.output_path).parent, *([cfg.plots] if cfg.plots else [])):
        require_writable_dir(folder)


def print_summary(report: dict[str, Any]) -> None:
    """What was found, on a few lines."""
    if "sparsity" in report:
        sparsity = report["sparsity"]
        print(f"{report['base_ckpt']} -> {report['ft_ckpt']}: {sparsity['num_params']:,} parameters, eta {sparsity['eta']:g}")
        for name, row in report["definitions"].items():
            print(f"  {name:20s} {row['sparsity_percent']:9.4f} % unchanged {row['num_changed']:>14,} changed: "
                  f"{row['changed_if']}")
        if report["nonfinite"]["num_either"]:
            print(f"  warning: {report['nonfinite']['num_either']:,} elements are NaN or infinite; counted as changed")
    for kind, row in report.get("geometry", {}).get("by_module_kind", {}).items():
        principal, low = row["principal_mask"], row["low_magnitude_mask"]
        print(f"  {kind:9s} rotation {row['max_left_angle_deg']:.4g} / {row['max_right_angle_deg']:.4g} degrees (left/right), "
              f"overlap with principal mask {_shown(principal['overlap'])} (chance {principal['chance']:.3f}), "
              f"low-magnitude {_shown(low['overlap'])} ({low['chance']:.3f})")
    if "compare" in report:
        total = report["compare"]["total"]
        print(f"  {len(report['compare']['runs'])} runs: mean Jaccard {_shown(total['mean_jaccard'])}, chance "
              f"{_shown(total['mean_jaccard_chance'])} (by tensor {_shown(total['mean_jaccard_chance_by_tensor'])})")
    for point in report.get("trajectory", {}).get("points", []):
        before = point["vs_previous"]
        print(f"  {point['name']}: {point['sparsity_percent']:.4f} % unchanged since the base, "
              f"{before['definitions']['seed_formula_bf16']['sparsity_percent']:.4f} % since {before['name']}")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    run_script(main, SparsityConfig, description=__doc__)
