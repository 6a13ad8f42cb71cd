"""Run folders and files: strict JSON, JSON lines, atomic writes, env.json, exit codes.

Everything a script writes passes through here: written beside its final name, flushed to disk, then renamed, so that a killed
process or a full disk never leaves half a file under a name that another script reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

from config import DTYPE_BYTES, ROOT, PrecisionArm, UserError, WorkError, parse_config

EXIT_DONE, EXIT_FAILED, EXIT_BAD_REQUEST, EXIT_INTERRUPTED = 0, 1, 2, 3
HASH_CHUNK_BYTES = 1 << 20
# Fields of metrics.jsonl (prefixes) that two identical runs may differ in: clocks, rates and memory.
NON_DETERMINISTIC_FIELDS = ("seconds/", "tokens_per_second", "memory/")


class Interrupted(Exception):
    """Work stopped on a signal after its state was written. Scripts exit with 3."""


# --------------------------------------------------------------------------------------------------------------------
# Script entry

def run_script(main: Callable[[Any], int | None], config_class: type, argv: list[str] | None = None,
               description: str | None = None) -> None:
    """Parse options, run ``main(cfg)`` and leave with the project's exit codes (0, 1, 2, 3); errors are one line."""
    try:
        cfg = parse_config(config_class, argv, description)
        code = main(cfg) or EXIT_DONE
    except UserError as error:
        code = _complain(error, EXIT_BAD_REQUEST)
    except WorkError as error:
        code = _complain(error, EXIT_FAILED)
    except Interrupted as error:
        code = _complain(error, EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        code = _complain("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG):
            raise
        code = _complain(f"{error.strerror}: {error.filename or 'while writing'}", EXIT_FAILED)
    sys.exit(code)


def _complain(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


# --------------------------------------------------------------------------------------------------------------------
# Writing

@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path``; renamed to ``path`` when the block ends well, removed when it raises."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        yield aside
        with open(aside, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) atomically."""
    with atomic_path(path) as aside:
        aside.write_text(text, encoding="utf-8")


def find_nonfinite(value: Any, where: str = "") -> str | None:
    """Key path of the first NaN or infinity in a JSON-like value, or None."""
    if isinstance(value, float):
        return where or "value" if not math.isfinite(value) else None
    items: Iterable = ()
    if isinstance(value, dict):
        items = ((f"{where}.{k}" if where else str(k), v) for k, v in value.items())
    elif isinstance(value, (list, tuple)):
        items = ((f"{where}[{i}]", v) for i, v in enumerate(value))
    return next((found for key, v in items if (found := find_nonfinite(v, key))), None)


def strict_json(value: Any, indent: int | None = 1) -> str:
    """JSON text without NaN or Infinity. Raises ValueError that names the key holding one."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    except ValueError:
        raise ValueError(f"not finite, cannot be written as strict JSON: {find_nonfinite(value)}") from None


def write_json(path: str | Path, value: Any) -> None:
    """Write strict JSON atomically. Raises ValueError for NaN/Infinity (write null and a reason instead)."""
    write_text(path, strict_json(value) + "\n")


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> None:
    """Write one strict JSON object a line, atomically."""
    with atomic_path(path) as aside, open(aside, "w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(strict_json(row, indent=None) + "\n")


def append_jsonl(path: str | Path, row: Any) -> None:
    """Append one line and flush it to the operating system, so that a killed process loses at most this line."""
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(strict_json(row, indent=None) + "\n")


# --------------------------------------------------------------------------------------------------------------------
# Reading

def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def read_json(path: str | Path) -> Any:
    """Parsed strict JSON. Raises UserError naming the file and, for malformed JSON, the line."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_reject_constant)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno}: not valid JSON ({error.msg})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def read_jsonl(path: str | Path, tolerate_last: bool = False) -> list[Any]:
    """All objects of a JSON-lines file. ``tolerate_last``: ignore a last line cut short by a kill."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    rows = []
    for i, line in numbered:
        try:
            rows.append(json.loads(line, parse_constant=_reject_constant))
        except ValueError as error:
            if tolerate_last and i == numbered[-1][0]:
                break
            raise UserError(f"{path} line {i}: not valid JSON ({getattr(error, 'msg', error)})") from None
    return rows


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def require_writable_dir(path: str | Path) -> Path:
    """Create folder ``path`` if needed and prove that a file can be written in it; UserError otherwise."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write_test{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(f"output folder {path} is not writable: {error.strerror or error}; choose another") from None
    return path


# --------------------------------------------------------------------------------------------------------------------
# Environment

def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Commit and dirty flag of the code, or nulls outside a git checkout."""
    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def package_versions(names: tuple[str, ...] = ("torch", "transformers", "numpy", "scipy", "safetensors", "math-verify",
                                               "datasets", "accelerate", "vllm")) -> dict[str, str | None]:
    """Installed version of each package, null where it is missing; reads metadata only, imports nothing."""
    from importlib.metadata import PackageNotFoundError, version
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    """Model name and vector flags that decide which matrix kernels run."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown")
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{name} ({' '.join(units)})"


def environment_info() -> dict[str, Any]:
    """Code version, package versions and machine, without importing torch."""
    return {**git_state(), "versions": package_versions(), "cpu": cpu_name(), "cpu_count": os.cpu_count(),
            "platform": platform.platform()}


# --------------------------------------------------------------------------------------------------------------------
# Pre-flight: what a run needs, before anything is downloaded

KNOWN_PARAMETERS = {"Qwen/Qwen2.5-Math-7B": 7_615_616_512, "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
                    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008}
WORKSPACE_SHARE = 0.15  # activations, logits of one chunk and the sampler's cache, on top of what grows with the parameters


def memory_per_parameter(arm: PrecisionArm) -> dict[str, int]:
    """Bytes per parameter that one process holds in ``arm``; a part is 0 where it is the same tensor as another.

    theta_0 is kept in bf16 (exact: the base is on the bf16 grid) to count changed weights.
    """
    master, compute = DTYPE_BYTES[arm.param_dtype], DTYPE_BYTES[arm.compute_dtype]
    return {
        "master": master,
        "compute_copy": compute if arm.compute_dtype != arm.param_dtype else 0,
        "gradients": DTYPE_BYTES[arm.grad_accum_dtype],
        "moments": 2 * DTYPE_BYTES[arm.optimizer_state_dtype],
        "compensation": 2 if arm.update_rounding == "kahan" else 0,
        "rollout_copy": DTYPE_BYTES[arm.rollout_dtype] if arm.rollout_dtype != arm.compute_dtype else 0,
        "theta_0": 2,
    }


def gpus_needed(parameters: int, arm: PrecisionArm, gpu_gb: float) -> int:
    """GPUs of ``gpu_gb`` (1e9 bytes) over which the state of ``arm`` must be sharded, with WORKSPACE_SHARE on top."""
    need = parameters * sum(memory_per_parameter(arm).values()) * (1 + WORKSPACE_SHARE)
    return math.ceil(need / (gpu_gb * 1e9))


def count_parameters(model: str) -> int | None:
    """Number of stored parameters of a model folder (from its safetensors headers) or of a hub id; None if it cannot be told."""
    folder = Path(model)
    if folder.is_dir():
        total = 0
        for shard in sorted(folder.glob("*.safetensors")):
            with open(shard, "rb") as handle:
                header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
            total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
        return total or None
    if model in KNOWN_PARAMETERS:
        return KNOWN_PARAMETERS[model]
    size = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([bBmM])(?![A-Za-z])", model)
    return int(float(size.group(1)) * (1e9 if size.group(2) in "bB" else 1e6)) if size else None


def available_memory_bytes(device: str) -> tuple[int, str]:
    """Free bytes and a description: all visible NVIDIA GPUs together, or this machine's main memory (cgroup limit heeded)."""
    if device in ("auto", "cuda"):
        try:
            done = subprocess.run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
                                  capture_output=True, text=True, timeout=20)
            free = [int(line) << 20 for line in done.stdout.split()] if done.returncode == 0 else []
        except (OSError, ValueError, subprocess.TimeoutExpired):
            free = []
        if free:
            return sum(free), f"{len(free)} GPU(s)"
    free_bytes = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                free_bytes = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free_bytes = min(free_bytes, limit - used)
    return free_bytes, "main memory of this machine"


def require_memory(model: str, arms: dict[str, PrecisionArm], device: str) -> dict[str, float]:
    """Refuse a run that cannot fit, before anything is downloaded or loaded.

    Args:    model: folder or hub id. arms: name -> arm that will be trained. device: auto | cpu | cuda.
    Returns: GB (1e9 bytes) that each arm needs; empty where the model's size is unknown.
    Raises:  UserError that states the need of every arm and names configs/tiny.yaml.
    """
    parameters = count_parameters(model)
    if parameters is None:
        return {}
    need = {name: parameters * sum(memory_per_parameter(arm).values()) * (1 + WORKSPACE_SHARE) / 1e9 for name, arm in arms.items()}
    free, where = available_memory_bytes(device)
    if max(need.values()) * 1e9 > free:
        listed = ", ".join(f"{name} {gb:.1f} GB" for name, gb in need.items())
        raise UserError(f"{model} ({parameters / 1e9:.2f} B parameters) does not fit: it needs {listed}; {where} has "
                        f"{free / 1e9:.1f} GB free. For a run on this machine use --config configs/tiny.yaml")
    return need
