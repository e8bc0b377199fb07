"""Operations: for each a plain PyTorch function that says what it means and, beside it, a fast one.

Nothing above this folder knows Triton, CUDA graphs or sharded tensors. `kernels` decides which of the two runs.
"""

from stepformer.ops.dtypes import as_products, at_least_fp32, product_dtype
from stepformer.ops.heads import newton_schulz, whiten
from stepformer.ops.kernels import has_triton, interpreted, off, switched_on, twice_differentiable, usable
from stepformer.ops.linear import Linear, linear
from stepformer.ops.operation import faster, operation

__all__ = ["Linear", "as_products", "at_least_fp32", "faster", "has_triton", "interpreted", "linear", "newton_schulz"]
__all__ += ["off", "operation", "product_dtype", "switched_on", "twice_differentiable", "usable", "whiten"]
