"""A matrix multiply for JAX on NVIDIA GPUs whose output-tile order is plain data."""

# First, because another distribution on the package index also installs a package `schedules`.
try:
    from schedules import Schedule as Schedule
except ImportError as error:
    # Only this name: when our own `schedules` lacks NumPy, that is what the user must read.
    if error.name != "schedules":
        raise
    raise ImportError(
        "pallas_gemm needs the package `schedules` of the distribution pallas-gemm, but the one"
        f" found is {error.path or 'missing'}: uninstall or rename what put it there, then"
        " reinstall pallas-gemm",
        name="schedules",
        path=error.path,
    ) from error

from pallas_gemm import checkpoint_policies as checkpoint_policies
from pallas_gemm._version import __version__ as __version__
from pallas_gemm.api.accelerate import AccelerateWarning as AccelerateWarning
from pallas_gemm.api.accelerate import accelerate as accelerate
from pallas_gemm.api.collective import all_gather_gemm as all_gather_gemm
from pallas_gemm.api.collective import gemm_reduce_scatter as gemm_reduce_scatter
from pallas_gemm.api.einsum import einsum as einsum
from pallas_gemm.api.explaining.explain import explain as explain
from pallas_gemm.api.explaining.explain import explain_on_mesh as explain_on_mesh
from pallas_gemm.api.explaining.explanation import Explanation as Explanation
from pallas_gemm.api.few_bits.model_weights import quantize_weights as quantize_weights
from pallas_gemm.api.few_bits.weights import QuantizedWeight as QuantizedWeight
from pallas_gemm.api.gemm import dot_general as dot_general
from pallas_gemm.api.gemm import gated_gemm as gated_gemm
from pallas_gemm.api.gemm import gemm as gemm
from pallas_gemm.api.gemm import matmul as matmul
from pallas_gemm.api.groups.group_sums import group_sums as group_sums
from pallas_gemm.api.groups.grouped import grouped_gemm as grouped_gemm
from pallas_gemm.api.groups.grouped import ragged_dot as ragged_dot
from pallas_gemm.api.groups.grouped import ragged_dot_general as ragged_dot_general
from pallas_gemm.api.loss import LogProbs as LogProbs
from pallas_gemm.api.loss import linear_cross_entropy as linear_cross_entropy
from pallas_gemm.api.loss import linear_log_probs as linear_log_probs
from pallas_gemm.api.loss import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from pallas_gemm.api.numerics import numerics as numerics
from pallas_gemm.api.precompile import Precompiled as Precompiled
from pallas_gemm.api.precompile import precompile as precompile
from pallas_gemm.api.projections import projections as projections
from pallas_gemm.api.quantize import Quantized as Quantized
from pallas_gemm.api.quantize import quantize as quantize
from pallas_gemm.api.recipe import Cast as Cast
from pallas_gemm.api.recipe import Recipe as Recipe
from pallas_gemm.api.symmetric import gram as gram
from pallas_gemm.api.symmetric import symmetric_matmul as symmetric_matmul
from pallas_gemm.computer.driver import skip_check_without_driver as _skip_check_without_driver
from pallas_gemm.config import GemmConfig as GemmConfig
from pallas_gemm.kernels.blackwell.config import BlackwellConfig as BlackwellConfig
from pallas_gemm.kernels.hopper.config import HopperConfig as HopperConfig
from pallas_gemm.op.mesh.reduction import reduce_in as reduce_in
from pallas_gemm.op.rounding import round_once as round_once
from pallas_gemm.planning.ignored import IgnoredWarning as IgnoredWarning
from pallas_gemm.planning.ignored import PromotedWarning as PromotedWarning
from pallas_gemm.planning.tables import Table as Table
from pallas_gemm.planning.targeting import target as target
from pallas_gemm.tuning.autotune import autotune as autotune
from schedules._public import names as _public_names

_skip_check_without_driver()


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public_names(globals(), "__version__", "checkpoint_policies", "flax", "offline")
