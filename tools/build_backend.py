"""The build backend: scikit-build-core, plus what a CUDA build needs, where there is one.

``JGG_CUDA`` (environment variable, or ``-C cmake.define.JGG_CUDA=``) is AUTO, ON or OFF:
AUTO builds the CUDA kernels where an NVIDIA driver and an nvcc are found. With ON and no nvcc, the
compiler comes from PyPI, all parts from one series: pip would mix an nvvm into it whose PTX the
ptxas refuses.
"""

import os
import shutil
from pathlib import Path

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403

CUTLASS = "nvidia-cutlass==4.2.0.0"
COMPILER = [
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
]


def _setting(config_settings) -> str:
    for key in ("cmake.define.JGG_CUDA", "JGG_CUDA"):
        if config_settings and key in config_settings:
            return str(config_settings[key]).upper()
    return os.environ.get("JGG_CUDA", "AUTO").upper()


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(
        os.environ.get("CUDACXX") or shutil.which("nvcc") or (Path(home) / "bin/nvcc").exists()
    )


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _cuda_requirements(config_settings) -> list[str]:
    setting = _setting(config_settings)
    if setting == "OFF" or (setting == "AUTO" and not (_has_driver() and _has_nvcc())):
        return []
    return [CUTLASS] + ([] if _has_nvcc() else COMPILER)


def _with_setting(config_settings):
    """Hand the decision to CMake, so that both make the same one."""
    settings = dict(config_settings or {})
    settings.pop("JGG_CUDA", None)
    settings["cmake.define.JGG_CUDA"] = "ON" if _cuda_requirements(config_settings) else "OFF"
    return settings


def get_requires_for_build_wheel(config_settings=None):
    return _backend.get_requires_for_build_wheel(None) + _cuda_requirements(config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _backend.get_requires_for_build_editable(None) + _cuda_requirements(config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _backend.build_wheel(wheel_directory, _with_setting(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _backend.build_editable(
        wheel_directory, _with_setting(config_settings), metadata_directory
    )


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return _backend.prepare_metadata_for_build_wheel(
        metadata_directory, _with_setting(config_settings)
    )
