"""Operations: for each a plain PyTorch function that says what it means and, beside it, a fast one.

Nothing above this folder knows Triton, CUDA graphs or sharded tensors. `kernels` decides which of the two runs.
"""

from stepformer.ops.kernels import has_triton, interpreted, off, switched_on, twice_differentiable, usable

__all__ = ["has_triton", "interpreted", "off", "switched_on", "twice_differentiable", "usable"]
