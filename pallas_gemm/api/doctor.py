"""How this computer computes a product, for bug reports and for the curious."""

import contextlib
import importlib.util
import platform
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from pallas_gemm import offline
from pallas_gemm._version import NEWEST_TESTED_JAX, __version__
from pallas_gemm.api.explaining.explain import explain
from pallas_gemm.api.gemm import gemm, matmul
from pallas_gemm.computer import driver, kept_files
from pallas_gemm.planning import proof, targeting
from pallas_gemm.planning.architectures import ARCHITECTURES

SAMPLE = (4096, 4096, 4096)
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
"""The plugins of JAX for GPUs."""
CHECKED = (70, 136, 72)
"""Small enough for the simulator, and with an edge in every dimension."""


def report() -> tuple[str, bool]:
    """Returns what `python -m pallas_gemm doctor` prints, and whether all is well."""
    checks = list(_checks())
    lines = [*_versions(), "", *_devices(), "", *_choice(), "", "self-check"]
    lines += [f"  {name:<10} {outcome}" for name, outcome, _ in checks]
    return "\n".join(lines) + "\n", all(fine for _, _, fine in checks)


def _versions() -> Iterator[str]:
    yield f"pallas_gemm {__version__}, Python {platform.python_version()}"
    yield f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    if _jax_version() > NEWEST_TESTED_JAX:
        tested = ".".join(map(str, NEWEST_TESTED_JAX))
        yield f"  newer than {tested}, the newest JAX that this version was tested with"
    missing = offline.missing_packages()
    yield "compile for absent GPUs: " + ("no: pip install '.[aot]'" if missing else "yes")
    flax = importlib.util.find_spec("flax") is not None
    yield "layers for Flax: " + ("yes" if flax else "no: pip install '.[flax]'")
    yield f"kernels kept on disk: {_kept()}"


def _kept() -> str:
    try:
        folder, most = kept_files.folder(), kept_files.limit()
        if why := kept_files.why_not_trusted(folder):
            return f"no: {why}"
        if most == 0:
            return f"no: {kept_files.LIMIT_VARIABLE} is 0"
        return f"{kept_files.size() / 1e6:.1f} of at most {most / 1e6:.0f} MB in {folder}"
    except (OSError, ValueError) as error:
        return f"no: {error}"


def _jax_version() -> tuple[int, ...]:
    return jax.__version_info__


def _devices() -> Iterator[str]:
    yield f"devices of the default backend, {jax.default_backend()}"
    for device in jax.local_devices():
        known = targeting.device_of(device)
        yield f"  {device.id}: {device.device_kind}" + (
            f", compute capability {'.'.join(map(str, known.compute_capability))}, {known.sms} SMs"
            if known
            else ""
        )
    if driver.found() and jax.default_backend() != "gpu":
        yield f"  CUDA's driver is here, but JAX uses no GPU: {_way_to_gpu()}"


def _way_to_gpu() -> str:
    """Returns what to do where there is a driver, and JAX uses no GPU."""
    if platforms := _platforms():
        return f"unset JAX_PLATFORMS, which is {platforms!r}"
    if not any(map(importlib.util.find_spec, PLUGINS)):
        return "pip install '.[cuda13]' (or '.[cuda12]' for an older driver)"
    return "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()' says why"


def _platforms() -> str:
    return jax.config.jax_platforms or ""


def _choice() -> Iterator[str]:
    m, n, k = SAMPLE
    a, b = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    yield "what computes a product here"
    yield from (f"  {line}" for line in str(explain(matmul, a, b)).splitlines())


def _checks() -> Iterator[tuple[str, str, bool]]:
    """Yields (implementation, outcome, whether it is fine)."""
    gpu = targeting.first_gpu()
    runnable = {a.name: proof.why_untrusted(a, gpu) for a in ARCHITECTURES if gpu and a.fits(gpu)}
    for name in ("xla", *runnable, "interpret"):
        if why := runnable.get(name):
            yield name, why, True
            continue
        try:
            with _device_for(name):
                wrong = _wrong_elements(name)
        except Exception as error:  # Whatever is broken is what is looked for.
            yield name, f"failed: {type(error).__name__}: {error}", False
        else:
            fine = wrong == 0
            yield name, "exact" if fine else f"{wrong} elements are wrong", fine


def _device_for(implementation: str) -> contextlib.AbstractContextManager[Any]:
    """Puts the operands of the simulator, which is a program of the CPU, where it is."""
    if implementation != "interpret":
        return contextlib.nullcontext()
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def _wrong_elements(implementation: str) -> int:
    """Multiplies small integers, whose sums are exact, and counts what is not."""
    m, n, k = CHECKED
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (m, k)), rng.integers(-4, 5, (k, n))
    result = gemm(
        jnp.asarray(a, jnp.bfloat16),
        jnp.asarray(b, jnp.bfloat16),
        preferred_element_type=jnp.float32,
        implementation=implementation,
    )
    return int(np.sum(np.asarray(result) != a @ b))
