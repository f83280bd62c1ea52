"""--upipe-overlap auto: decided by a simulation of the command line, the same on all ranks."""

import argparse

import pytest
from end_to_end.training import MODEL

from megatron_upipe.integration import overlap
from megatron_upipe.planning.fit_command import scenario_of_flags

FLAGS = [*MODEL, "--bf16", "--vocab-size", "256", "--context-parallel-size", "2", "--use-distributed-optimizer"]


def test_on_where_the_simulated_peak_fits():
    answer, why = overlap.overlap_fits(FLAGS, 2, 2, memory_gib=80.0, vocabulary=512)
    assert answer == "on" and "simulated peak" in why


def test_off_where_it_does_not():
    long = [flag if flag != "96" else "4194304" for flag in FLAGS]
    answer, why = overlap.overlap_fits(long, 2, 2, memory_gib=7.0, vocabulary=512)
    assert answer == "off" and "simulated peak" in why


@pytest.mark.parametrize("flags", [["--upipe-heads"], ["--micro-batch-size", "4"]])
def test_off_where_the_command_line_is_not_simulated(flags):
    answer, why = overlap.overlap_fits([*FLAGS, *flags], 2, 2, memory_gib=80.0, vocabulary=512)
    assert answer == "off" and "not simulated" in why and len(why) > 60


def test_flags_may_be_written_with_an_equals_sign():
    scenario, _ = scenario_of_flags([*FLAGS, "--upipe-overlap=on", "--upipe-keep-attention=1"], 2, 2)
    assert (scenario.overlap, scenario.keep_attention) == ("on", 1)


SETTINGS = dict(upipe_overlap=None, context_parallel_size=2, hierarchical_context_parallel_sizes=None)
SETTINGS |= dict(upipe_heads_per_stage=None, num_attention_heads=16, tensor_model_parallel_size=2)


@pytest.mark.parametrize("given", [dict(upipe_heads_per_stage=8), dict(num_attention_heads=4)])
def test_off_where_one_stage_has_all_heads(given, monkeypatch):
    monkeypatch.setattr(overlap.cpu, "is_installed", lambda: False)
    assert overlap.resolve_overlap(argparse.Namespace(**SETTINGS | given)) == "off"


def test_off_where_the_simulation_itself_fails(monkeypatch):
    monkeypatch.setattr(overlap.torch.cuda, "current_device", lambda: 1 / 0)
    assert overlap._by_simulation(argparse.Namespace()) == (
        "off",
        "this command line is not simulated (ZeroDivisionError: division by zero)",
    )


@pytest.mark.parametrize("given", ["on", "off"])
def test_what_is_given_counts(given):
    args = argparse.Namespace(upipe_overlap=given, context_parallel_size=2)
    assert overlap.resolve_overlap(args) == given


def _resolved(rank, cpu):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap.cpu, "is_installed", lambda: cpu)
        patch.setattr(overlap, "_by_simulation", lambda args: ("on", "rank 0 says so") if rank == 0 else 1 / 0)
        return overlap.resolve_overlap(argparse.Namespace(**SETTINGS))


@pytest.mark.parametrize("cpu", [True, False])
def test_all_ranks_do_what_rank_0_found(workers, cpu):
    assert workers.run(2, _resolved, cpu) == ["on", "on"]
