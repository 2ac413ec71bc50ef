"""Policies for `jax.checkpoint` that know the products of this package.

JAX's own `dots_saveable` looks for `dot_general` and would compute every product here again. Each
of these does the same as JAX's policy of that name, and also keeps the results that `gemm` and its
relatives name `pallas_gemm_out`. With an activation it keeps the pre-activation too, so that the
backward pass multiplies nothing twice.
"""

from collections.abc import Callable
from typing import Any

import jax

from pallas_gemm.call import OUT_NAME
from schedules import _public

_OURS = jax.checkpoint_policies.save_only_these_names(OUT_NAME)


def dots_saveable(prim: Any, *args: Any, **params: Any) -> Any:
    """Keeps the result of every product, JAX's and ours."""
    return jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, _OURS
    )(prim, *args, **params)


def dots_with_no_batch_dims_saveable(prim: Any, *args: Any, **params: Any) -> Any:
    """Keeps the result of every product of this package, and of XLA's that have no batch."""
    return jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _OURS
    )(prim, *args, **params)


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable[..., Any]:
    """Returns a policy that moves what `dots_with_no_batch_dims_saveable` keeps to other memory.

    Args:
        offload_src: Where results are, such as "device".
        offload_dst: Where they wait for the backward pass, such as "pinned_host".
    """
    where = {"offload_src": offload_src, "offload_dst": offload_dst}
    theirs = jax.checkpoint_policies.offload_dot_with_no_batch_dims(**where)
    ours = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[OUT_NAME], **where
    )

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        # Only one of the two says of a primitive to keep it, and what they say is not just a bool.
        named = prim.name == "name"
        return (ours if named else theirs)(prim, *args, **params)

    return policy


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
