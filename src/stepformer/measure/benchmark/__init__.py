"""How fast architectures are on this machine: measuring, stored results, tables, targets (`stepformer bench`)."""
