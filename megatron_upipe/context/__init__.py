"""The Ulysses x ring world: groups, sequence layout, exchange, ring, lse merge. Imports no Megatron.

Letters, here and in ``attention/``: P ``ulysses_size``, R ``ring_size``, S sequence length, s = S/(P*R) tokens of a
context-parallel rank, L = S/R tokens of a ring rank (all of its Ulysses ranks together), b micro-batch, H and K query
and KV heads of a tensor-parallel rank, g = H/K, d head dim, U heads per stage, m = U/P.
"""
