"""How the devices of a mesh share a product: what each has, and what is sent."""
