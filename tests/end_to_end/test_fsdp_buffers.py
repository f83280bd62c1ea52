"""What Megatron-FSDP holds while layers run is what the simulator counts (planning/states.py)."""

import json
from pathlib import Path

import pytest
from end_to_end.training import train

UPIPE = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec", "--context-parallel-size", "2"]
FSDP = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params", "--ckpt-format"),
    *("fsdp_dtensor", "--megatron-fsdp-main-grads-dtype", "fp32", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--suggested-communication-unit-size", "1", "--num-layers", "4", "--train-iters", "2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "every", "units", "waiting"), [(96, 1, 1, 1), (768, 1, 1, 0), (768, 2, 2, 0)])
def test_held_while_layers_run(tmp_path, monkeypatch, tokens, every, units, waiting):
    """Embedding and output layer, the running layer (and one that runs again), and gradients of the module before,
    on long sequences not even those."""
    monkeypatch.setenv("FSDP_PROBE", str(tmp_path / "seen.json"))
    sizes = ["--seq-length", str(tokens), "--max-position-embeddings", str(tokens)]
    flags = [*UPIPE, *FSDP, *sizes, "--upipe-checkpoint-every", str(every)]
    probe = str(Path(__file__).with_name("fsdp_probe.py"))
    train(tmp_path, "fsdp", 2, *flags, script=probe, distributed_optimizer=False)
    seen = json.loads((tmp_path / "seen.json").read_text())
    for half in seen.values():
        gathered = [[unit for unit in found if unit is not None] for found, _ in half]
        assert all(None in found for found, _ in half)
        assert max(map(len, gathered)) <= units and min(map(len, gathered)) >= 1
    assert len(seen["second_half_gradient"]) == 2 * 2 * 4  # iterations, micro-batches, layers
    assert max(queue for _, queue in seen["second_half_gradient"]) == waiting
