"""One file per weight format: the bytes of its 16 × 64 tile, and how a tile is multiplied. Knows no expert and no thread."""
