"""The product as JAX sees it: types, derivatives, `vmap`, meshes, lowering."""
