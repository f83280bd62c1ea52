"""The demo's model and training flags: a small Llama (GQA, RoPE, RMSNorm, SwiGLU) on bytes."""

SEQUENCE_LENGTH = 2048
EOD = 255  # no UTF-8 text contains this byte, so it can end a document

MODEL = {
    "--num-layers": 2,
    "--hidden-size": 96,
    "--ffn-hidden-size": 256,
    "--num-attention-heads": 8,
    "--group-query-attention": None,
    "--num-query-groups": 4,
    "--seq-length": SEQUENCE_LENGTH,
    "--max-position-embeddings": SEQUENCE_LENGTH,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": None,
    "--disable-bias-linear": None,
    "--untie-embeddings-and-output-weights": None,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
}

TRAINING = {
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": EOD + 1,
    "--split": "90,5,5",
    "--micro-batch-size": 1,
    "--global-batch-size": 2,
    "--train-iters": 20,
    "--lr": 2e-3,
    "--min-lr": 2e-4,
    "--lr-decay-style": "cosine",
    "--lr-warmup-iters": 2,
    "--clip-grad": 1.0,
    "--use-distributed-optimizer": None,
    "--no-create-attention-mask-in-dataloader": None,
    "--log-interval": 1,
    "--eval-interval": 10,
    "--eval-iters": 2,
    "--seed": 1234,
}


ULYSSES_SIZE, RING_SIZE = 2, 2

UPIPE = {
    "--spec": ("megatron_upipe.layer_specs", "upipe_layer_spec"),
    "--context-parallel-size": ULYSSES_SIZE * RING_SIZE,
    "--hierarchical-context-parallel-sizes": (ULYSSES_SIZE, RING_SIZE),
}


def as_flags(*groups: dict) -> list[str]:
    """Flattens ``{flag: value}`` groups into a command line; None is a flag without a value, a tuple several."""
    flags: list[str] = []
    for group in groups:
        for flag, value in group.items():
            values = () if value is None else value if isinstance(value, tuple) else (value,)
            flags += [flag, *map(str, values)]
    return flags
