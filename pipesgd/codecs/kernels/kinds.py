"""Numbers of the kernels' options, the same for all devices."""

ABSMAX, NORM, CLIPPED = 0, 1, 2
"""Rules for the scale of a block: its largest magnitude; its Euclidean norm; a multiple of its root mean square, as
long as that is below the largest magnitude."""

TRUNCATE16, BF16, FP16 = 0, 1, 2
"""Sixteen-bit floats: the upper half of the word; bfloat16, rounded; IEEE half, rounded."""
