"""The launcher and the plug-in's flags: each refusal is one clear sentence."""

import argparse
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_upipe import cli
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu, flags, launcher, versions
from megatron_upipe.integration.symbols import registry


@pytest.fixture(autouse=True)
def clean():
    """No test leaves the plug-in installed."""
    yield
    registry.undo(launcher.OWNER)
    registry.undo(cpu.stand_in.OWNER)


def run(*argv):
    """A launcher process; returns (exit status, stderr lines that it wrote itself)."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_upipe.run", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )
    return (
        done.returncode,
        [line for line in done.stderr.splitlines() if line.startswith("megatron_upipe")],
        done.stdout,
    )


def test_unknown_flag_names_the_nearest():
    status, errors, _ = run("--num-layer", "2")
    assert status == 2
    assert errors == ["megatron_upipe: error: unknown flag --num-layer; the nearest known one is --num-layers"]


def test_missing_script():
    status, errors, _ = run("no_such_script.py", "--num-layers", "2")
    assert status == 2
    assert errors == [
        "megatron_upipe: error: script no_such_script.py is not a file; name one, or leave it out for the built-in "
        "GPT entry"
    ]


def test_runs_a_script_as_main_with_its_folder_first(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside\nprint(__name__, beside.VALUE, sys.argv[1:])\n")
    status, errors, out = run(str(script), "--x", "1")
    assert (status, errors) == (0, [])
    assert "__main__ 7 ['--x', '1']" in out


def test_help_teaches_and_needs_no_megatron():
    status, _, out = run("--help")
    assert status == 0
    assert "torchrun" in out and "--upipe-cpu" in out and "--megatron-help" in out


def test_megatron_outside_the_range(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "check_megatron_version", lambda: versions.check_megatron_version("<0.1"))
    assert launcher.main(["--num-layers", "2"]) == 2
    assert "error: megatron_upipe needs megatron-core<0.1, found 0.1" in capsys.readouterr().err


def test_gpu_in_use(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert launcher.main(["--upipe-cpu"]) == 2
    assert "this process already uses a GPU; leave out --upipe-cpu" in capsys.readouterr().err
    assert not registry.installed


def test_install_is_undone_whole():
    launcher.install()
    assert registry.owners() == {launcher.OWNER, cpu.stand_in.OWNER} and len(registry.describe()) > 50
    with pytest.raises(UPipeError, match="already installed"):
        launcher.install()
    registry.undo(launcher.OWNER)
    registry.undo(cpu.stand_in.OWNER)
    assert not registry.installed


def parse(*argv):
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(argv)


def test_stand_in_changes_defaults_and_user_wins():
    launcher.install(force_cpu=True)
    args = parse()
    assert {name: getattr(args, name) for name in flags.CPU_DEFAULTS} == flags.CPU_DEFAULTS
    assert parse("--num-workers", "3").num_workers == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--distributed-backend", "nccl"], "--distributed-backend nccl needs a GPU; on a CPU it is gloo"),
        (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine needs a GPU"),
        (["--fp8-format", "hybrid"], "--fp8-format hybrid needs TransformerEngine and a GPU"),
        (["--attention-backend", "flash"], "--attention-backend flash needs a GPU"),
        (["--use-torch-fsdp2"], "--use-torch-fsdp2 needs a GPU; on a CPU use --use-distributed-optimizer"),
        (["--context-parallel-size", "2"], "--context-parallel-size 2 with Megatron's own attention needs a GPU"),
    ],
)
def test_stand_in_refuses_gpu_flags(argv, message):
    launcher.install(force_cpu=True)
    with pytest.raises(UPipeError, match=message):
        flags.check_flags(parse(*argv))
    flags.check_flags(parse())  # the twin: nothing given, nothing refused


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["no_such_module", "spec"], r"--spec no_such_module spec: the module cannot be imported: No module named"),
        (["megatron_upipe.layer_specs", "x"], r"--spec megatron_upipe.layer_specs x: the module has no x"),
        (["megatron_upipe.layer_specs"], r"--spec megatron_upipe.layer_specs: two words are needed"),
    ],
)
def test_spec_that_megatron_would_swallow(spec, message):
    launcher.install(force_cpu=True)
    with pytest.raises(UPipeError, match=message):
        flags.check_flags(parse("--spec", *spec))
    flags.check_flags(parse("--spec", "megatron_upipe.layer_specs", "upipe_layer_spec"))


def test_metrics_file_needs_a_folder(tmp_path):
    launcher.install(force_cpu=True)
    for bad in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(UPipeError, match="is not a file in an existing folder"):
            flags.check_flags(parse("--upipe-metrics", str(bad)))
    flags.check_flags(parse("--upipe-metrics", str(tmp_path / "file")))


def test_megatron_help_is_printable(capsys):
    launcher.install(force_cpu=True)
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--upipe-heads-per-stage" in capsys.readouterr().out


def test_no_flags_at_all(capsys):
    assert launcher.main([]) == 2
    assert "usage: torchrun" in capsys.readouterr().out


def test_bad_value_is_one_sentence():
    launcher.install(force_cpu=True)
    with pytest.raises(UPipeError, match="argument --num-layers: invalid int value: 'two'"):
        parse("--num-layers", "two")


def test_every_flag_is_on_in_some_test():
    parser = flags.add_upipe_flags(argparse.ArgumentParser(add_help=False))
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    ours = [option for action in parser._actions for option in action.option_strings]
    assert len(ours) == 14 and all(f'"{flag}"' in tests for flag in ours)


def test_cli_info(capsys):
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["megatron-core"] == versions.megatron_core_version().public
    assert cli.main(["info"]) == 0
    assert "megatron-upipe" in capsys.readouterr().out


FIND_PYTHON = os.path.join(os.path.dirname(__file__), "..", "..", "tools", "find_python.sh")


def find_python(path, **env):
    return subprocess.run(
        ["/bin/bash", FIND_PYTHON],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path), **env},
    )


def fake_python(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + textwrap.dedent(body))
    path.chmod(0o755)


def test_find_python_passes_over_names_that_do_not_run(tmp_path):
    fake_python(tmp_path / "python3.13", "echo 'no such version' >&2; exit 127")
    fake_python(tmp_path / "python3.12", f'exec {sys.executable} "$@"')
    assert find_python(tmp_path).stdout.strip() == str(tmp_path / "python3.12")
    fake_python(tmp_path / "mine", f'exec {sys.executable} "$@"')
    assert find_python(tmp_path, PYTHON=str(tmp_path / "mine")).stdout.strip() == str(tmp_path / "mine")


def test_find_python_looks_into_pyenv_and_says_what_to_install(tmp_path):
    for name in ("python3.13", "python3.12", "python3"):
        fake_python(tmp_path / name, "exit 1")
    nothing = find_python(tmp_path)
    assert nothing.returncode == 1
    assert nothing.stderr.startswith("no Python >= 3.12") and "install" in nothing.stderr
    found = tmp_path / ".pyenv/versions/3.12.9/bin/python3"
    fake_python(found, f'exec {sys.executable} "$@"')
    assert find_python(tmp_path).stdout.strip() == str(found)
