"""The planner against other layouts, its speed model against published throughput, its flags against Megatron."""

import argparse
import json
import shlex
from dataclasses import replace

import pytest

from megatron_upipe import cli
from megatron_upipe.attention.schedule import legal_heads_per_stage
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu, flags, launcher
from megatron_upipe.integration.symbols import registry
from megatron_upipe.planning.authors import authors_work
from megatron_upipe.planning.models import PRESETS, ModelShape
from megatron_upipe.planning.plan import QUANTUM, Limits, Search
from megatron_upipe.planning.report import report
from megatron_upipe.planning.scenario import Scenario, parse_tokens, tokens_text
from megatron_upipe.planning.speed import Machine, step_time
from megatron_upipe.planning.training_flags import training_flags

SMALL = ModelShape("small", 4, 64, 8, 4, 8, 96, 500)
MIB = 2**20


def search(device, host=10**12, fixed=(), **changes):
    said = []
    base = Scenario(**{"model": SMALL, "gpus": 4, "tokens": QUANTUM, **changes})
    found = Search(base, frozenset(fixed), Limits(device * MIB, host), Machine(), said.append)
    return found, said


@pytest.mark.slow
def test_longest_is_longest():
    planner, said = search(96)
    longest = planner.longest()
    assert report(longest).device_peak <= 96 * MIB and longest.offload == "host" and said
    for p in (2, 4):
        for heads in legal_heads_per_stage(8, 4, p)[:2]:
            more = replace(longest, ulysses=p, ring=4 // p, heads_per_stage=heads, tokens=longest.tokens + QUANTUM)
            assert report(more).device_peak > 96 * MIB


@pytest.mark.slow
def test_longest_within_the_host():
    """Inputs of every layer, or of fewer: the bytes that the host has decide."""
    host, fixed = 1024 * MIB, dict(model=replace(SMALL, layers=16), ulysses=4, offload="host")
    every = search(10**6, host, list(fixed), **fixed)[0].longest()
    assert report(every).host <= host < report(replace(every, tokens=every.tokens + QUANTUM)).host
    fixed["checkpoint_every"] = 1
    with pytest.raises(UPipeError, match=r"--host-memory 0.00\d+ is too little for 64K tokens; the least is 0"):
        search(10**6, 2**20, list(fixed), **fixed)[0].longest()
    assert QUANTUM <= search(10**6, host, list(fixed), **fixed)[0].longest().tokens < every.tokens


@pytest.mark.slow
def test_any_number_of_gpus_and_heads_that_some_layouts_allow():
    found = search(10**6, gpus=6)[0].fastest(6 * QUANTUM).report.scenario
    assert found.sizes == (2, 3)
    fixed = dict(heads_per_stage=2)
    found = search(10**6, fixed=list(fixed), **fixed)[0].fastest(QUANTUM).report.scenario
    assert found.sizes == (2, 2) and found.heads_per_stage == 2


@pytest.mark.slow
def test_longest_on_the_device_alone():
    """Without host memory; what is found fits when it is asked for."""
    planner, _ = search(40, host=0, fixed=["ulysses"], ulysses=4)
    longest = planner.longest()
    assert longest.offload == "none" and planner.fastest(longest.tokens).report.host == 0


@pytest.mark.slow
def test_fastest_where_memory_is_ample():
    choice = search(10**6)[0].fastest(QUANTUM)
    found = choice.report.scenario
    assert (found.sizes, found.offload, found.keep_attention, found.sharding) == ((4, 1), "none", 4, found.sharding)
    assert found.heads_per_stage == 8 and choice.time.step == pytest.approx(sum(choice.time.parts.values()))
    planner = replace(search(10**6)[0], machine=Machine(collective_us=0.01))
    assert planner.fastest(QUANTUM).report.scenario.heads_per_stage == 4  # as fast, in less memory


@pytest.mark.slow
def test_fastest_keeps_what_fits():
    """Between what 1 and 4 layers' attention need, 2 or 3 keep theirs; what the user has chosen stays."""
    base = dict(gpus=4, tokens=4 * QUANTUM, offload="none", sharding="megatron-fsdp")
    needs = [report(Scenario(model=SMALL, **base, keep_attention=k)).device_peak for k in (1, 4)]
    limit = sum(needs) / 2 / MIB
    fixed = dict(offload="none", sharding="megatron-fsdp", heads_per_stage=4)
    planner, _ = search(limit, fixed=list(fixed), **fixed)
    choice = planner.fastest(4 * QUANTUM)
    found = choice.report.scenario
    assert found.keep_attention in (2, 3) and found.offload == "none" and found.heads_per_stage == 4
    assert choice.report.device_peak <= limit * MIB < report(replace(found, keep_attention=4)).device_peak


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_the_nearest_that_does():
    fixed = dict(ulysses=4, offload="host", sharding="megatron-fsdp", checkpoint_every=2)
    planner, _ = search(40, fixed=list(fixed), **fixed)
    longest = planner.longest().tokens
    with pytest.raises(UPipeError, match=f"fits in no configuration; the longest .* is {tokens_text(longest)}"):
        planner.fastest(64 * longest)
    assert planner.fastest(longest)
    with pytest.raises(UPipeError, match=r"--gpus 4 do not hold small: 64K tokens need .* GiB of 0.0; use cards with"):
        search(0.1)[0].longest()


@pytest.mark.parametrize(
    "changes",
    [
        dict(ring=2, offload="host", prefetch="on", keep_attention=3, checkpoint_every=2, heads_per_stage=8),
        dict(offload="none", sharding="distributed-optimizer"),
        dict(tensor_parallel=2, offload="none", sharding="ddp", attention_backend="torch-cpu"),
        dict(sharding="distributed-optimizer", optimizer_on_host=True),
    ],
)
def test_flags_are_megatrons(changes):
    scenario = Scenario(model=SMALL, gpus=8, tokens=QUANTUM, **{"attention_backend": "torch-cpu", **changes})
    model = shlex.split(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
        "--kv-channels 16 --swiglu --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope"
    )
    launcher.install(force_cpu=True)
    try:
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args = parser.parse_args([*model, *training_flags(scenario)])
        if scenario.optimizer_on_host:
            with pytest.raises(UPipeError, match="--use-precision-aware-optimizer needs a GPU"):
                flags.check_flags(args)
        else:
            flags.check_flags(args)
    finally:
        registry.undo(launcher.OWNER)
        registry.undo(cpu.stand_in.OWNER)
    p, r = scenario.sizes
    assert (args.context_parallel_size, args.hierarchical_context_parallel_sizes) == (p * r, [p, r])
    assert args.seq_length == QUANTUM and args.upipe_heads_per_stage == scenario.schedule.heads_per_stage
    assert args.use_megatron_fsdp is (scenario.sharding == "megatron-fsdp")
    assert args.optimizer_cpu_offload is scenario.optimizer_on_host


# tokens a second and GPU of the paper's code, from its project page; one row fitted the constants
THROUGHPUT = {
    ("llama3-8b", 8, 1): {
        **{"128K": 2281.05, "256K": 1487.29, "512K": 867.17, "1M": 472.53, "2M": 246.07},
        **{"3M": 166.32, "4M": 125.56, "5M": 98.25},
    },
    ("qwen3-32b-no-qk-norm", 16, 2): {"512K": 204.46, "1M": 113.26, "2M": 59.56, "3M": 40.42, "4M": 29.97},
}


@pytest.mark.parametrize(("run", "row"), THROUGHPUT.items(), ids=lambda value: str(value)[:20])
def test_speed_of_the_papers_code(run, row):
    model, gpus, ring = run
    for tokens, published in row.items():
        one = Scenario(PRESETS[model], gpus, parse_tokens(tokens), ring=ring, method="authors", prefetch="on")
        assert step_time(one, authors_work(one), Machine()).tokens_per_gpu == pytest.approx(published, rel=0.05), tokens


def test_slower_links_and_less_hidden_cost_time():
    run = Scenario(model=SMALL, gpus=8, tokens=2**20, ring=2, gpus_per_node=4)
    work = report(run).work
    usual = step_time(run, work, Machine())
    for slower in (Machine(node_gb_s=1), Machine(network_gb_s=0.1), Machine(host_gb_s=0.1), Machine(gemm_tflops=1)):
        assert step_time(run, work, slower).step > usual.step
    assert "inputs fetched" in usual.parts
    assert "inputs fetched" not in step_time(replace(run, prefetch="on"), work, Machine()).parts
    assert step_time(replace(run, optimizer_on_host=True), work, Machine()).step > usual.step


def test_constants(tmp_path):
    path = tmp_path / "constants.json"
    path.write_text('{"gemm_tflops": 100}')
    assert Machine.read(str(path)) == replace(Machine(), gemm_tflops=100.0) and Machine.read(None) == Machine()
    for text, message in (
        ('{"gemm": 1}', "has gemm, which is not one of attention_backward_tflops"),
        ('{"gemm_tflops": 0}', "has gemm_tflops 0; it has to be more than 0"),
        ("[]", "is not a JSON object of numbers"),
        ('{"gemm_tflops": "fast"}', "is not a JSON object of numbers"),
    ):
        path.write_text(text)
        with pytest.raises(UPipeError, match=message):
            Machine.read(str(path))


@pytest.fixture
def base(tmp_path):
    config = tmp_path / "config.json"
    sizes = dict(hidden_size=512, num_attention_heads=16, num_key_value_heads=8, intermediate_size=1024)
    config.write_text(json.dumps(dict(**sizes, num_hidden_layers=4, vocab_size=1000)))
    return ["plan", "--model", str(config), "--gpus", "4", "--gpu-memory", "2", "--reserve", "1", "--tokens", "128K"]


def test_command(capsys, base):
    fixed = ["--ulysses", "4", "--heads-per-stage", "4"]  # a shorter search
    assert cli.main([*base, *fixed, "--json", "--offload", "host"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["simulated"] is True and found["tokens"] == 2**17 and found["configuration"]["offload"] == "host"
    assert found["device_peak_gib"] + found["margin_gib"]["device"] == pytest.approx(1, abs=0.01)
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()), abs=0.01)
    assert "--upipe-offload" in found["flags"] and " s] " in err
    assert cli.main(base) == 0
    text = capsys.readouterr().out
    assert "train with" in text and "--context-parallel-size 4" in text and "not a measurement" in text
    again = shlex.split(text.rsplit("\n  megatron-upipe ", 1)[1])
    assert cli.main([*again, "--gpu-memory", "2", "--reserve", "1"]) == 0


@pytest.mark.slow
def test_plot(base, tmp_path):
    picture = tmp_path / "lengths.png"
    assert cli.main([*base, "--plot", str(picture)]) == 0 and picture.stat().st_size > 10000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "lama"], "--model lama is not known; the nearest is llama3-"),
        (["--gpus", "6", "--tp", "4"], "--gpus 6 is not a multiple of --tp 4"),
        (["--gpus", "1"], "--gpus 1 with --tp 1 are one context-parallel rank"),
        (["--ulysses", "3"], "--ulysses 3 x --ring 2 is not 8"),
        (["--ring", "3"], "--ulysses 2 x --ring 3 is not 8"),
        (["--heads-per-stage", "12"], "--upipe-heads-per-stage 12"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png is not a picture in an existing folder"),
        (["--constants", "/nowhere.json"], "--constants /nowhere.json cannot be read"),
        (["--gpus", "8", "--tokens", "much"], "--tokens much is not a number"),
        pytest.param(
            *(["--gpu-memory", "14"], "--gpus 8 do not hold llama3-8b: 64K tokens need 2"), marks=pytest.mark.slow
        ),
    ],
)
def test_impossible_requests_are_one_sentence(capsys, given, message):
    assert cli.main(["plan", "--model", "llama3-8b", "--gpus", "8", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.splitlines()[-1].startswith("megatron-upipe: error: ")
