"""The thing under study: formats of weights, compute, gradients and moments; the optimizer; the audit.

A weight has a *master* (updated by the optimizer, stored in checkpoints) and a *compute copy* (in the module, used by forward and
backward); where both have one format they are one tensor. ``MasterAdamW`` owns masters, moments, weight decay and rounding, and
writes the masters into the module after every step, so that two arms differ in the cells of their rows and in nothing else.

On CPUs without bf16/fp16 units the matrix products of low-precision arms run as float32 products of the rounded operands, rounded
once: the definition that GPUs implement in hardware, at float32 speed (``Numerics.cpu_matmul == "emulated"``).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator

import torch
from torch import Tensor, nn

from config import PrecisionArm, UserError, WorkError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOW_PRECISION = (torch.bfloat16, torch.float16)
ATTENTION_NAME = "rlvr_sdpa"  # our entry in transformers' table of attention functions

AUDIT_PRODUCT_K = 4096  # inner length of the measured product; long enough for reduced-precision accumulation to show
# Frobenius error of a K = 4096 product against float64, relative to the product. float32 accumulation: a few 1e-7; TF32 operands
# (10 mantissa bits): about 3e-4. For low-precision results the reference is rounded too, and float32 accumulation then differs
# from it in under 0.5 % of entries by one ULP (2^-8): about 3e-4 in Frobenius norm; a bf16 accumulator: above 1e-2.
AUDIT_TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-3, "float16": 5e-4}

UPDATE_CHUNK = 1 << 24  # elements per slice of an optimizer update: about ten float32 temporaries of 64 MiB

ULP_BINS_LOG2 = (-24, 16)  # range of the |update| / ULP histogram, in powers of two; half an octave per bin


# --------------------------------------------------------------------------------------------------------------------
# Global switches

@dataclass(frozen=True)
class Numerics:
    """What setup_numerics() switched on; the audit compares it with the row of the arm."""

    device: str
    deterministic: bool
    sdpa_backend: str
    cpu_matmul: str  # "native" or "emulated"
    num_threads: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_EMULATE = False  # set by setup_numerics(); read by the attention function, which transformers calls without our arguments


def cpu_has_native(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of ``dtype`` in hardware (AVX512-BF16/FP16 or AMX), read from /proc/cpuinfo."""
    units = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}[dtype]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return bool(units & set(flags))


def resolve_device(device: str) -> str:
    """"auto" -> "cuda" where a GPU is usable, else "cpu". Raises UserError when cuda is asked for and absent."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no usable NVIDIA GPU found; use --device cpu")
    return device


def setup_numerics(deterministic: bool, sdpa_backend: str = "auto", cpu_matmul: str = "auto", num_threads: int = 0,
                   device: str = "cpu", low_precision: torch.dtype = torch.bfloat16) -> Numerics:
    """Set every global switch that changes floating-point results, the same way in every arm but for determinism.

    TF32 off everywhere (torch and Triton), reduced-precision reductions and fp16 accumulation off, one scaled-dot-product
    attention backend, strict deterministic algorithms where the arm says so.

    Args:    deterministic: strict mode (an operation without a deterministic kernel raises).
             sdpa_backend: auto | math | efficient | flash; auto is math on CPU and efficient on CUDA.
             cpu_matmul: auto | native | emulated, for low-precision products on a CPU.
             num_threads: torch's intra-op threads, 0 leaves torch's choice. device: cpu | cuda.
             low_precision: the format that "auto" looks up in the CPU's flags.
    Returns: what was set.
    """
    global _EMULATE
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # read when Triton is imported
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.backends.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.fp32_precision = "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
    # Filling fresh memory (a debugging aid of strict mode) costs time and changes no result of code that reads what it wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False

    if sdpa_backend == "auto":
        sdpa_backend = "math" if device == "cpu" else "efficient"
    torch.backends.cuda.enable_math_sdp(sdpa_backend == "math")
    torch.backends.cuda.enable_flash_sdp(sdpa_backend == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(sdpa_backend == "efficient")
    torch.backends.cuda.enable_cudnn_sdp(False)

    if cpu_matmul == "auto":
        cpu_matmul = "native" if device != "cpu" or cpu_has_native(low_precision) else "emulated"
    _EMULATE = cpu_matmul == "emulated" and device == "cpu"
    _register_attention()
    return Numerics(device, deterministic, sdpa_backend, cpu_matmul, torch.get_num_threads())


def read_switches() -> dict[str, Any]:
    """The switches as torch reports them now, by reading, not from memory."""
    matmul = torch.backends.cuda.matmul
    return {
        "fp32_precision": torch.backends.fp32_precision,
        "cuda_matmul_fp32_precision": matmul.fp32_precision,
        "cudnn_fp32_precision": torch.backends.cudnn.fp32_precision,
        "mkldnn_matmul_fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "triton_f32_default": os.environ.get("TRITON_F32_DEFAULT"),
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "fp16_accumulation": matmul.allow_fp16_accumulation,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "sdpa_math": torch.backends.cuda.math_sdp_enabled(),
        "sdpa_flash": torch.backends.cuda.flash_sdp_enabled(),
        "sdpa_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "sdpa_cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
    }


# --------------------------------------------------------------------------------------------------------------------
# Low-precision products on a CPU without the units: float32 products of the rounded operands, rounded once

class _RoundedLinear(torch.autograd.Function):
    """y = round(x W^T + b) with float32 accumulation; each gradient is a float32 product rounded once, as on a GPU."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, weight_f32: Tensor) -> Tensor:
        x_f32 = x.float()
        ctx.save_for_backward(x, weight_f32)
        ctx.has_bias = bias is not None
        return nn.functional.linear(x_f32, weight_f32, bias.float() if bias is not None else None).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight_f32 = ctx.saved_tensors
        grad_f32 = grad.float()
        rows = grad_f32.reshape(-1, grad_f32.shape[-1])
        grad_x = (grad_f32 @ weight_f32).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).float()).to(x.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0).to(x.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


class _RoundedEmbedding(torch.autograd.Function):
    """Row lookup whose gradient is summed in float32 and rounded once (torch's CPU kernel sums in the low format)."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32)
        total.index_add_(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).float())
        return None, total.to(ctx.dtype)


class EmulatedLinear(nn.Linear):
    """nn.Linear for bf16/fp16 weights on a CPU without the units; same parameters, same state dict."""

    def weight_f32(self) -> Tensor:
        """float32 image of the weight, remade whenever the weight was written (its version counter tells)."""
        key = (self.weight.data_ptr(), self.weight._version)
        cached = self.__dict__.get("_f32")
        if cached is None or cached[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                cached = (key, self.weight.detach().float())
            self.__dict__["_f32"] = cached
        return cached[1]

    def forward(self, x: Tensor) -> Tensor:
        return _RoundedLinear.apply(x, self.weight, self.bias, self.weight_f32())


class EmulatedEmbedding(nn.Embedding):
    """nn.Embedding whose low-precision gradient is accumulated in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return _RoundedEmbedding.apply(ids, self.weight)


def emulate_low_precision(model: nn.Module) -> int:
    """Swap the class of every low-precision Linear and Embedding for its emulated twin; returns how many were swapped."""
    swapped = 0
    for module in model.modules():
        twin = {nn.Linear: EmulatedLinear, nn.Embedding: EmulatedEmbedding}.get(type(module))
        if twin and module.weight.dtype in LOW_PRECISION:
            module.__class__ = twin
            swapped += 1
    return swapped


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs):
    """transformers' scaled-dot-product attention; under emulation in float32 on the rounded operands, rounded once."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    dtype = query.dtype
    if _EMULATE and dtype in LOW_PRECISION:
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out.to(dtype), weights


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


# --------------------------------------------------------------------------------------------------------------------
# Models

def _require_model(path: str) -> None:
    """UserError when ``path`` is meant as a folder and is none. A hub id has at most one slash and no leading dot or slash."""
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise UserError(f"model folder {path} has no config.json")
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).parts[0] in ("data", "results", "models")
    if looks_local:
        raise UserError(f"model folder {path} does not exist")


def load_model(path: str, dtype: str, device: str, numerics: Numerics, revision: str | None = None) -> nn.Module:
    """A causal language model with weights in ``dtype``, our pinned attention, eval mode, dropout off.

    Args:    path: folder or hub id. dtype: float32 | bfloat16 | float16. device: cpu | cuda.
    Raises:  UserError if the folder or hub id cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    _require_model(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=DTYPES[dtype],
                                                     attn_implementation=ATTENTION_NAME, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model {path} cannot be loaded: {str(error).splitlines()[0]}") from None
    # Buffers such as the rotary frequencies stay as transformers made them (float32); only parameters have the asked dtype.
    wrong = [name for name, p in model.named_parameters() if p.dtype != DTYPES[dtype]]
    if wrong:
        raise WorkError(f"model {path}: parameter {wrong[0]} was loaded as {model.get_parameter(wrong[0]).dtype}, not {dtype}")
    if device == "cpu" and numerics.cpu_matmul == "emulated" and DTYPES[dtype] in LOW_PRECISION:
        emulate_low_precision(model)
    return model.to(device).eval()


def load_tokenizer(path: str, revision: str | None = None):
    """The tokenizer of ``path``. Raises UserError if it is missing."""
    from transformers import AutoTokenizer
    _require_model(path)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer of {path} cannot be loaded: {str(error).splitlines()[0]}") from None


def check_base_on_bf16_grid(model: nn.Module, path: str) -> None:
    """Every arm must start from one theta_0, so the base weights must be exactly representable in bf16; UserError if not."""
    for name, p in model.named_parameters():
        off = int((p.bfloat16().to(p.dtype) != p).sum())
        if off:
            raise UserError(f"base model {path}: {off} values of {name} are not representable in bfloat16, so the arms would start "
                            "from different weights; round it once with scripts/prepare_model.py --source folder")


def set_dropout(model: nn.Module, policy: str) -> None:
    """policy "off": probability 0 everywhere (modules and attention). "model": what the checkpoint's config says."""
    if policy == "model":
        return
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if hasattr(model.config, "attention_dropout"):
        model.config.attention_dropout = 0.0


def dropout_probabilities(model: nn.Module) -> dict[str, float]:
    """Dropout probability of every module that has one (attention included)."""
    found = {name: float(m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    found |= {f"{name}.attention": float(m.attention_dropout) for name, m in model.named_modules()
              if isinstance(getattr(m, "attention_dropout", None), (int, float))}
    return found


def module_kind(name: str) -> str:
    """q, k, v, o, gate, up, down, norm, embedding, head, or other: the part of the network a parameter name belongs to."""
    for part, kind in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "o"), ("gate_proj", "gate"),
                       ("up_proj", "up"), ("down_proj", "down"), ("lm_head", "head"), ("embed", "embedding"), ("norm", "norm")):
        if part in name:
            return kind
    return "other"


# --------------------------------------------------------------------------------------------------------------------
# Rounding

def hash_u32(x: Tensor) -> Tensor:
    """A bijective mix of 32-bit integers (lowbias32, https://nullprogram.com/blog/2018/07/31/), on int32 tensors."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * as_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def as_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def stable_hash(*parts: object) -> int:
    """63-bit hash of any printable values; the same on every machine and in every process."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stochastic_bits(shape: torch.Size, key: int, offset: int, device: torch.device) -> Tensor:
    """16 random bits per element in an int32 tensor, a function of (key, offset + flat index) alone.

    ``offset`` is the flat index of the first element in the unsharded tensor, so shards draw the bits of their own elements.
    """
    index = torch.arange(offset, offset + shape.numel(), dtype=torch.int64, device=device)
    low = (index & 0xFFFFFFFF).to(torch.int64)
    low = torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
    high = (index >> 32).to(torch.int32)
    mixed = hash_u32(hash_u32(low ^ as_int32(key)) ^ high ^ as_int32(key >> 32))
    return (mixed & 0xFFFF).reshape(shape)


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16, up with probability equal to the distance from the value below in units of the gap.

    Args:    x: float32. bits: int32 of the same shape with values in [0, 65535].
    Returns: bfloat16; non-finite values pass through as nearest rounding leaves them.
    """
    rounded = ((x.view(torch.int32) + bits) & as_int32(0xFFFF0000)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def ulp(x: Tensor) -> Tensor:
    """Distance to the next larger magnitude in x's own format, as float32; the smallest subnormal at zero."""
    mantissa_bits, min_exponent = {torch.float32: (23, -149), torch.bfloat16: (7, -133), torch.float16: (10, -24)}[x.dtype]
    _, exponent = torch.frexp(x.float())  # x = m 2^exponent, m in [0.5, 1); (0, 0) for zero
    exponent = torch.where(x == 0, min_exponent, (exponent - 1 - mantissa_bits).clamp(min=min_exponent))
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


# --------------------------------------------------------------------------------------------------------------------
# What rounding threw away

class UpdateStats:
    """Counts over one optimizer step, per module kind: elements, non-zero updates, lost updates, changed since theta_0."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, Tensor]] = {}
        low, high = ULP_BINS_LOG2
        self.num_bins = 2 * (high - low)
        self.histogram: Tensor | None = None

    @torch.no_grad()
    def add(self, kind: str, old: Tensor, new: Tensor, update: Tensor, kept: Tensor, base: Tensor) -> None:
        """One tensor's step.

        Args:    old, new: stored weight before and after. update: float32 change computed before rounding.
                 kept: bool, True where the whole stored state (weight and, under kahan, compensation) is what it was.
                 base: theta_0 in bfloat16.
        """
        moved = update != 0
        counts = {"elements": torch.tensor(old.numel(), device=old.device), "nonzero": moved.sum(),
                  "lost": (moved & kept).sum(), "changed": (new != base.to(new.dtype)).sum(),
                  "changed_bf16": (new.bfloat16() != base).sum()}
        mine = self.kinds.setdefault(kind, {k: torch.zeros((), dtype=torch.int64, device=old.device) for k in counts})
        for key, value in counts.items():
            mine[key] += value
        low, high = ULP_BINS_LOG2
        ratio = update.abs() / ulp(old)
        # Bin 0 holds everything below the range, the last bin everything above; zero updates are not in the histogram.
        bins = ((ratio.log2() - low) * 2).floor().clamp(0, self.num_bins - 1).to(torch.int64)
        counted = torch.bincount(bins[moved], minlength=self.num_bins)
        self.histogram = counted if self.histogram is None else self.histogram + counted

    def reduce(self) -> dict[str, Any]:
        """Shares for metrics.jsonl. All are shares of elements; null where there is no non-zero update."""
        kinds = {kind: {k: int(v) for k, v in counts.items()} for kind, counts in self.kinds.items()}
        total = {k: sum(c[k] for c in kinds.values()) for k in ("elements", "nonzero", "lost", "changed", "changed_bf16")}
        share = lambda a, b: a / b if b else None  # noqa: E731
        return {
            "precision/lost_update_share": share(total["lost"], total["nonzero"]),
            "precision/nonzero_update_share": share(total["nonzero"], total["elements"]),
            "precision/changed_share_vs_base": share(total["changed"], total["elements"]),
            "precision/changed_share_vs_base_bf16": share(total["changed_bf16"], total["elements"]),
            "precision/update_over_ulp_median": self.median_ratio(),
            "precision/lost_update_share_by_kind": {k: share(c["lost"], c["nonzero"]) for k, c in sorted(kinds.items())},
            "precision/changed_share_by_kind": {k: share(c["changed"], c["elements"]) for k, c in sorted(kinds.items())},
            "precision/update_over_ulp_histogram": {
                "log2_low": ULP_BINS_LOG2[0], "log2_step": 0.5, "counts": self.histogram.tolist()},
        }

    def median_ratio(self) -> float | None:
        """Median of |update| / ULP(old weight) over non-zero updates, interpolated in log2 inside its half-octave bin."""
        counts = self.histogram.double()
        total = float(counts.sum())
        if not total:
            return None
        cumulative = counts.cumsum(0)
        i = int((cumulative < total / 2).sum())
        before = float(cumulative[i - 1]) if i else 0.0
        return float(2 ** (ULP_BINS_LOG2[0] + 0.5 * (i + (total / 2 - before) / float(counts[i]))))


# --------------------------------------------------------------------------------------------------------------------
# The optimizer

def is_sharded(t: Tensor) -> bool:
    """True for a DTensor, which is what fully_shard makes of a parameter."""
    from torch.distributed.tensor import DTensor
    return isinstance(t, DTensor)


def local_part(t: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; the tensor itself otherwise."""
    return t.to_local() if is_sharded(t) else t


def shard_offset(t: Tensor) -> int:
    """Flat index, in the whole tensor, of the first element of this rank's part. Shards are along dimension 0."""
    if not is_sharded(t):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    _, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return int(offsets[0]) * (t.numel() // max(1, t.shape[0])) if t.dim() else 0


class MasterAdamW:
    """AdamW (decoupled weight decay) that owns masters, moments and rounding for every arm.

    Order of operations is torch.optim.AdamW's (foreach=False): decay, first moment, second moment, bias correction, update. Where
    master, moments and gradient share one format the operations run in it, bit for bit as torch does; otherwise they run in
    float32 and each stored quantity is rounded once to its own format.

    Args:    model: module holding the compute copies. arm: formats. seed: of stochastic rounding.
             lr, betas, eps, weight_decay: as torch.optim.AdamW.
    Source:  Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101; Kahan summation as in https://arxiv.org/abs/2010.06192
    """

    def __init__(self, model: nn.Module, arm: PrecisionArm, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, seed: int = 0) -> None:
        self.arm, self.lr, self.betas, self.eps, self.weight_decay, self.seed = arm, lr, betas, eps, weight_decay, seed
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        master_dtype, state_dtype = DTYPES[arm.param_dtype], DTYPES[arm.optimizer_state_dtype]
        self.grad_dtype = DTYPES[arm.grad_accum_dtype]
        self.step_count = 0
        self.masters: dict[str, Tensor] = {}
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        self.compensation: dict[str, Tensor] = {}
        self.base: dict[str, Tensor] = {}
        self.offsets: dict[str, int] = {}  # flat index of the local part's first element in the whole tensor
        for name, p in self.params.items():
            local = local_part(p.detach())
            if not is_sharded(p):  # FSDP reduces in its own reduce_dtype
                p.grad_dtype = self.grad_dtype
            # A sharded parameter is a float32 container of the master's value: FSDP casts it to compute_dtype at the all-gather.
            shares = is_sharded(p) or p.dtype == master_dtype
            self.masters[name] = local if shares else local.to(master_dtype)
            self.exp_avg[name] = torch.zeros_like(local, dtype=state_dtype)
            self.exp_avg_sq[name] = torch.zeros_like(local, dtype=state_dtype)
            self.base[name] = local.to(torch.bfloat16, copy=True)  # theta_0 is on the bf16 grid: exact
            self.offsets[name] = shard_offset(p)
            if arm.update_rounding == "kahan":
                self.compensation[name] = torch.zeros_like(local, dtype=torch.bfloat16)

    def zero_grad(self) -> None:
        for p in self.params.values():
            p.grad = None

    def grads(self) -> Iterator[Tensor]:
        return (p.grad for p in self.params.values() if p.grad is not None)

    @torch.no_grad()
    def step(self, lr: float | None = None) -> UpdateStats:
        """One update from the gradients in the module; the module then holds the new masters. Returns what was lost."""
        self.step_count += 1
        lr = self.lr if lr is None else lr
        stats = UpdateStats()
        for name, p in self.params.items():
            if p.grad is not None:
                self._update(name, p, lr, stats)
        return stats

    def _update(self, name: str, p: Tensor, lr: float, stats: UpdateStats) -> None:
        master, grad = self.masters[name], local_part(p.grad)
        # Every operation is elementwise, so slices of the flat tensors bound the temporaries whatever the tensor's size.
        for start in range(0, master.numel(), UPDATE_CHUNK):
            part = slice(start, start + UPDATE_CHUNK)
            self._update_slice(name, part, grad.view(-1)[part], lr, stats)
        if not self._shared(p, master):
            p.copy_(master)

    @staticmethod
    def _shared(p: Tensor, master: Tensor) -> bool:
        return local_part(p.detach()).data_ptr() == master.data_ptr()

    def _update_slice(self, name: str, part: slice, grad: Tensor, lr: float, stats: UpdateStats) -> None:
        stored, m, v = (t[name].view(-1)[part] for t in (self.masters, self.exp_avg, self.exp_avg_sq))
        master = stored.to(DTYPES[self.arm.param_dtype])  # the same tensor unless stored in a float32 container
        grad = grad.to(self.grad_dtype)
        old = master.clone()
        if master.dtype == m.dtype == grad.dtype and self.arm.update_rounding == "nearest":
            self._adamw(master, grad, m, v, lr)
            # What the step asked for before rounding: from the new moments and the old weight.
            update = self._computed_update(old.float(), m.float(), v.float(), lr)
            kept = master == old
        else:
            work = old.float()
            if self.compensation:
                work = work + self.compensation[name].view(-1)[part].float()
            start, m_work, v_work = work.clone(), m.float(), v.float()
            self._adamw(work, grad.float(), m_work, v_work, lr)
            update = self._computed_update(start, m_work, v_work, lr)
            if m.dtype != torch.float32:
                m.copy_(m_work)
                v.copy_(v_work)
            kept = self._store(name, part, master, work, old)
        if master.data_ptr() != stored.data_ptr():
            stored.copy_(master)
        stats.add(module_kind(name), old, master, update, kept, self.base[name].view(-1)[part])

    def _adamw(self, param: Tensor, grad: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        """torch.optim.AdamW's single-tensor step, in place, in the tensors' own format."""
        beta1, beta2 = self.betas
        param.mul_(1 - lr * self.weight_decay)
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step_size = lr / (1 - beta1 ** self.step_count)
        denominator = (v.sqrt() / (1 - beta2 ** self.step_count) ** 0.5).add_(self.eps)
        param.addcdiv_(m, denominator, value=-step_size)

    def _computed_update(self, start: Tensor, m: Tensor, v: Tensor, lr: float) -> Tensor:
        """The change that the step computes before it is added to the weight and rounded, in float32."""
        step_size = lr / (1 - self.betas[0] ** self.step_count)
        denominator = (v.sqrt() / (1 - self.betas[1] ** self.step_count) ** 0.5).add_(self.eps)
        return (m / denominator).mul_(-step_size).add_(start, alpha=-lr * self.weight_decay)

    def _store(self, name: str, part: slice, master: Tensor, work: Tensor, old: Tensor) -> Tensor:
        """Round ``work`` into the stored master; returns True where nothing of the stored state changed."""
        rounding = self.arm.update_rounding
        if rounding == "stochastic":
            key = stable_hash("stochastic_rounding", self.seed, name, self.step_count)
            master.copy_(round_stochastic(work, stochastic_bits(work.shape, key, self.offsets[name] + part.start, work.device)))
        else:
            master.copy_(work)
        kept = master == old
        if rounding == "kahan":
            compensation = self.compensation[name].view(-1)[part]
            rest = (work - master.float()).to(torch.bfloat16)
            kept &= rest == compensation
            compensation.copy_(rest)
        return kept

    # --- state ------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and compensation by name, for the checkpoint (masters are saved as the model)."""
        out = {f"exp_avg.{k}": t for k, t in self.exp_avg.items()}
        out |= {f"exp_avg_sq.{k}": t for k, t in self.exp_avg_sq.items()}
        return out | {f"compensation.{k}": t for k, t in self.compensation.items()}

    @torch.no_grad()
    def load_state(self, masters: dict[str, Tensor], state: dict[str, Tensor], step_count: int) -> None:
        """Restore masters, moments and step; the module follows. Raises WorkError on a name, shape or format mismatch."""
        mine = {**self.masters, **self.state_tensors()}
        given = {**masters, **state}
        for name, target in mine.items():
            source = given.get(name)
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                found = "missing" if source is None else f"{tuple(source.shape)} {source.dtype}"
                raise WorkError(f"checkpoint tensor {name}: expected {tuple(target.shape)} {target.dtype}, found {found}")
            target.copy_(source)
        for name, p in self.params.items():
            if not self._shared(p, self.masters[name]):
                p.copy_(self.masters[name])
        self.step_count = step_count


@torch.no_grad()
def clip_grad_norm(optimizer: MasterAdamW, max_norm: float, scale: float = 1.0) -> float:
    """Divide the gradients by ``scale``, clip their global L2 norm to ``max_norm`` in place, return the norm before clipping.

    The norm is computed in float32 whatever the gradients' format. Clipping is skipped where max_norm is 0 or the norm is not finite.
    """
    norms, sharded = [], False
    for grad in optimizer.grads():
        sharded |= is_sharded(grad)
        grad = local_part(grad)
        if scale != 1.0:
            grad.div_(scale)
        norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))
    if not norms:
        return 0.0
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if sharded:
        total = norm ** 2
        torch.distributed.all_reduce(total)
        norm = total.sqrt()
    value = float(norm)
    if max_norm and value == value and max_norm < value < float("inf"):
        coefficient = max_norm / (norm + 1e-6)
        for grad in optimizer.grads():
            local_part(grad).mul_(coefficient.to(grad.dtype))
    return value


class LossScaler:
    """Dynamic loss scaling for float16 compute; a constant 1 for every other format.

    An overflow is not a lost step: the caller repeats the minibatch at half the scale.
    """

    INITIAL = 2.0 ** 16
    GROWTH_INTERVAL = 400  # steps without overflow before the scale doubles; verl's FP16 patch uses the same

    def __init__(self, compute_dtype: str) -> None:
        self.enabled = compute_dtype == "float16"
        self.value = self.INITIAL if self.enabled else 1.0
        self.good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.enabled else loss

    def overflowed(self) -> None:
        self.value, self.good_steps = self.value / 2, 0

    def succeeded(self) -> None:
        self.good_steps += 1
        if self.enabled and self.good_steps % self.GROWTH_INTERVAL == 0:
            self.value *= 2

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = state["value"], int(state["good_steps"])


# --------------------------------------------------------------------------------------------------------------------
# Audit: the formats in use, read from the running objects, against the row

def measure_product(dtype: torch.dtype, device: str, emulated: bool) -> float:
    """Frobenius error of one K = 4096 product in ``dtype`` against float64 of the same rounded operands, relative.

    For low-precision results the reference is rounded to the result's format first, so that what is measured is how the product was
    accumulated, not the final rounding.
    """
    generator = torch.Generator().manual_seed(20240229)
    a = torch.randn(64, AUDIT_PRODUCT_K, generator=generator).to(dtype)
    b = torch.randn(64, AUDIT_PRODUCT_K, generator=generator).to(dtype)
    if emulated:
        product = _RoundedLinear.apply(a, b, None, b.float())
    else:
        product = nn.functional.linear(a.to(device), b.to(device)).cpu()
    exact = a.double() @ b.double().t()
    return float((product.double() - exact.to(dtype).double()).norm() / exact.norm())


def _expect(report: dict[str, Any], name: str, expected: Any, found: Any) -> None:
    report[name] = {"expected": expected, "found": found}
    if expected != found:
        raise WorkError(f"precision audit: {name}: the arm says {expected}, the machine has {found}")


def _only(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({str(d).removeprefix("torch.") for d in dtypes}))


def audit(model: nn.Module, optimizer: MasterAdamW, arm: PrecisionArm, numerics: Numerics, logits_dtype: torch.dtype | None = None,
          grads: dict[str, torch.dtype] | None = None, rollout_dtypes: Iterable[torch.dtype] | None = None) -> dict[str, Any]:
    """Read the formats in use from the running objects and compare them with the arm's row.

    Args:    logits_dtype: dtype of the logits as the loss used them (after set-up None).
             grads: dtype of each accumulated gradient, taken before they were freed (after set-up None).
             rollout_dtypes: parameter dtypes of the sampler.
    Returns: every item with what was expected and found, for env.json.
    Raises:  WorkError naming the first item that differs, with both values.
    """
    report: dict[str, Any] = {}
    _expect(report, "master weights", arm.param_dtype, _only(t.dtype for t in optimizer.masters.values()))
    _expect(report, "module weights", arm.compute_dtype, _only(p.dtype for p in model.parameters()))
    _expect(report, "first moments", arm.optimizer_state_dtype, _only(t.dtype for t in optimizer.exp_avg.values()))
    _expect(report, "second moments", arm.optimizer_state_dtype, _only(t.dtype for t in optimizer.exp_avg_sq.values()))
    _expect(report, "gradient format asked of autograd", arm.grad_accum_dtype,
            _only(p.grad_dtype for p in optimizer.params.values()))
    if arm.update_rounding == "kahan":
        _expect(report, "compensation", "bfloat16", _only(t.dtype for t in optimizer.compensation.values()))
    if grads is not None:
        _expect(report, "accumulated gradients", arm.grad_accum_dtype, _only(grads.values()))
    if logits_dtype is not None:
        _expect(report, "logits in the loss", "float32", _only([logits_dtype]))
    if rollout_dtypes is not None:
        _expect(report, "rollout weights", arm.rollout_dtype, _only(rollout_dtypes))
    stale = [name for name, p in optimizer.params.items() if not torch.equal(p, optimizer.masters[name].to(p.dtype))]
    _expect(report, "module weights that differ from their masters", [], stale[:3])

    switches = read_switches()
    for key in ("fp32_precision", "cuda_matmul_fp32_precision", "cudnn_fp32_precision", "mkldnn_matmul_fp32_precision",
                "triton_f32_default"):
        _expect(report, key, "ieee", switches[key])
    for key in ("bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction", "fp16_accumulation",
                "deterministic_warn_only", "cudnn_benchmark", "sdpa_cudnn"):
        _expect(report, key, False, switches[key])
    _expect(report, "deterministic algorithms", arm.deterministic, switches["deterministic_algorithms"])
    for backend in ("math", "flash", "efficient"):
        _expect(report, f"sdpa_{backend}", backend == numerics.sdpa_backend, switches[f"sdpa_{backend}"])
    _expect(report, "attention function", ATTENTION_NAME, model.config._attn_implementation)

    dropout = dropout_probabilities(model)
    if arm.dropout == "off":
        _expect(report, "modules with dropout", {}, {k: p for k, p in dropout.items() if p})
    report["dropout"] = {"policy": arm.dropout, "largest": max(dropout.values(), default=0.0)}

    emulated = _EMULATE and DTYPES[arm.compute_dtype] in LOW_PRECISION
    if emulated:
        native = [n for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Embedding)]
        _expect(report, "layers outside the emulation", [], native[:3])
    error = measure_product(DTYPES[arm.compute_dtype], numerics.device, emulated)
    limit = AUDIT_TOLERANCE[arm.compute_dtype]
    report["measured product"] = {"dtype": arm.compute_dtype, "K": AUDIT_PRODUCT_K, "relative_error": error, "limit": limit}
    if not error <= limit:
        raise WorkError(f"precision audit: a {arm.compute_dtype} product is off by {error:.1e}, the limit is {limit:.1e}")
    return report


# --------------------------------------------------------------------------------------------------------------------
# Command: train twice, compare everything

def compare_runs(first: Path, second: Path, ignored_fields: tuple[str, ...]) -> str | None:
    """The first thing in which two finished run folders differ (tensor or metric), or None.

    Args: ignored_fields: prefixes of metric names that are clocks, rates and memory.
    """
    from safetensors.torch import load_file

    from utils_run import read_jsonl
    for folder in ("final_model", "checkpoints"):
        for path in sorted((first / folder).rglob("*.safetensors")):
            other = second / path.relative_to(first)
            if not other.exists():
                return f"{path.relative_to(first)} is missing in the second run"
            a, b = load_file(path), load_file(other)
            for name in sorted(a.keys() | b.keys()):
                if name not in a or name not in b:
                    return f"{path.relative_to(first)}: tensor {name} is in one run only"
                if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name]):
                    apart = int((a[name] != b[name]).sum()) if a[name].shape == b[name].shape else a[name].numel()
                    return f"{path.relative_to(first)}: tensor {name}, {apart} of {a[name].numel()} elements"
    for a, b in zip(read_jsonl(first / "metrics.jsonl"), read_jsonl(second / "metrics.jsonl"), strict=True):
        for key in a:
            if not key.startswith(ignored_fields) and a[key] != b.get(key):
                return f"metrics.jsonl step {a['step']}: {key}, {a[key]} and {b.get(key)}"
    return None


def print_memory_table(model: str) -> None:
    """Bytes per parameter of every arm, and how many 80 and 141 GB GPUs the model's training state needs."""
    from config import PRECISION_MODES
    from utils_run import count_parameters, gpus_needed, memory_per_parameter
    parameters = count_parameters(model)
    if parameters is None:
        raise UserError(f"--model_name_or_path {model}: its number of parameters cannot be told from its name; give a folder")
    names = list(memory_per_parameter(PRECISION_MODES["fp32"]))
    print(f"{model}, {parameters / 1e9:.3f} B parameters; bytes per parameter\n")
    print("| arm | " + " | ".join(names) + " | sum | GB | 80 GB GPUs | 141 GB GPUs |")
    print("|" + "---|" * (len(names) + 5))
    for arm_label, arm in PRECISION_MODES.items():
        parts = memory_per_parameter(arm)
        total = sum(parts.values())
        print(f"| {arm_label} | " + " | ".join(str(v) for v in parts.values()) + f" | {total} | {total * parameters / 1e9:.1f} | "
              f"{gpus_needed(parameters, arm, 80)} | {gpus_needed(parameters, arm, 141)} |")


def main(cfg) -> int:
    """The memory table, or: train twice in fresh processes and say whether anything differs."""
    if cfg.memory_table:
        print_memory_table(cfg.model_name_or_path)
        return 0
    return check_determinism(cfg)


def check_determinism(cfg) -> int:
    """Train twice in fresh processes and name the first difference; 1 if there is one."""
    import subprocess
    import sys
    import tempfile

    from config import ROOT
    from utils_run import NON_DETERMINISTIC_FIELDS
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("first", "second"):
            out = Path(scratch) / name
            command = [sys.executable, str(ROOT / "train_rlvr.py"), "--precision_mode", cfg.precision_mode, "--seed", str(cfg.seed),
                       "--num_steps", str(cfg.num_steps), "--output_dir", str(out)]
            command += ["--config", cfg.config] if cfg.config else []
            for pair in cfg.train_args:
                key, _, value = pair.partition("=")
                command += [f"--{key}", value]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
                raise WorkError(f"the {name} run failed with exit code {done.returncode}: {reason}")
            runs.append(out)
        difference = compare_runs(*runs, ignored_fields=NON_DETERMINISTIC_FIELDS)
    print(f"{cfg.precision_mode}, seed {cfg.seed}, {cfg.num_steps} steps, twice: "
          + (f"NOT identical, first difference in {difference}" if difference else "every stored tensor and metric identical"))
    return 1 if difference else 0


if __name__ == "__main__":
    from config import PrecisionCheckConfig
    from utils_run import run_script
    run_script(main, PrecisionCheckConfig)
