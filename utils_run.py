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
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

from config import ROOT, UserError, WorkError, parse_config

EXIT_DONE, EXIT_FAILED, EXIT_BAD_REQUEST, EXIT_INTERRUPTED = 0, 1, 2, 3
HASH_CHUNK_BYTES = 1 << 20


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
