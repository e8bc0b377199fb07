"""Who carries out a block: as written, or fused."""
