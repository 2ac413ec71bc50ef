"""Names for what a kernel is given while it is traced: to Python, each is anything."""

from typing import Any

Scalar = Any
"""A traced int32."""
Values = Any
"""An array in registers."""
Ref = Any
"""A reference to an array in memory: global, shared or tensor memory."""
