"""Shared test settings: no network, no display, and folders that several test files use."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before any test imports a library that reads them, and inherited by every script that a test starts.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run when it is selected with -m gpu or -m vllm."""
    reasons = {}
    if shutil.which("nvidia-smi") is None:
        reasons["gpu"] = "no NVIDIA GPU (nvidia-smi not found)"
    if importlib.util.find_spec("vllm") is None:
        reasons["vllm"] = "vllm is not installed (scripts/setup_env.sh --with-vllm)"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Folder of the scripts."""
    return ROOT


@pytest.fixture(scope="session")
def datasets_dir() -> Path:
    """Folder with local copies of the real benchmarks, or skip: RLVR_TEST_DATASETS, default ``../shared/datasets``."""
    folder = Path(os.environ.get("RLVR_TEST_DATASETS", ROOT.parent / "shared" / "datasets"))
    if not folder.is_dir():
        pytest.skip(f"no benchmark copies at {folder}; set RLVR_TEST_DATASETS")
    return folder
