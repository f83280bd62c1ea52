"""A Megatron-LM checkout's own training scripts, through the launcher and patched, as ``MEGATRON_LM`` names it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from end_to_end.training import MODEL, TRAINING, launch, train

ROOT = Path(__file__).parents[2]
SPEC = ["--spec", "megatron_upipe.layer_specs"]
USP = [*shlex.split("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"), *SPEC]
GPT = [*USP, "upipe_layer_spec", "--upipe-loss-tile-tokens", "11", "--upipe-mlp-tile-tokens", "7"]
PATTERN = ["--hybrid-layer-pattern", "*-*-"]
HYBRID = [*PATTERN, *USP, "upipe_hybrid_stack_spec", "--upipe-loss-tile-tokens", "11", "--upipe-mlp-tile-tokens", "7"]

pytestmark = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no Megatron-LM checkout")


def patcher():
    spec = importlib.util.spec_from_file_location("apply", ROOT / "patches" / "apply.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkout")


@pytest.fixture(scope="module")
def checkout():
    return Path(os.environ["MEGATRON_LM"])


@pytest.fixture(scope="module")
def patched(folder, checkout):
    """A patched copy: the scripts, and what they import."""
    copy = folder / "patched"
    shutil.copytree(checkout / "megatron", copy / "megatron")
    for script in checkout.glob("*.py"):
        shutil.copy(script, copy)
    assert "is patched; try" in patcher().run(copy)
    return copy


@pytest.fixture(scope="module")
def stock(folder, checkout):
    return train(folder, "stock", 1, script=str(checkout / "pretrain_gpt.py"))


def assert_close(found, expected, relative=1e-4):
    assert set(found) == set(expected)
    worst = max(abs(found[key] - expected[key]) / abs(expected[key]) for key in expected)
    assert worst <= relative, (worst, found, expected)


def test_unmodified_script_through_the_launcher(folder, checkout, stock):
    assert_close(train(folder, "launcher", 4, *GPT, script=str(checkout / "pretrain_gpt.py")), stock)


def test_patched_script_without_the_launcher(folder, patched, stock):
    script = str(patched / "pretrain_gpt.py")
    assert_close(train(folder, "patched", 4, *GPT, script=script, launcher=False), stock)
    assert_close(train(folder, "launched and patched", 4, *GPT, script=script), stock)


def test_patched_script_refuses_in_one_sentence(patched):
    flags = [*MODEL, *TRAINING, *GPT, "--upipe-heads-per-stage", "3"]
    done = launch(4, *flags, script=str(patched / "pretrain_gpt.py"), launcher=False)
    ours = {line for line in done.stderr.splitlines() if line.startswith("megatron_upipe: error")}
    assert done.returncode != 0 and len(ours) == 1 and "--upipe-heads-per-stage 3 is not possible" in ours.pop()
    assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("torch/distributed")[0]


def test_checkout_is_patched_and_reverted_in_a_repository(folder, checkout):
    """As a user has it: a clone. Uncommitted changes are refused."""
    clone = folder / "clone"
    shutil.copytree(checkout / "megatron" / "core", clone / "megatron" / "core")
    for script in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        shutil.copy(checkout / script, clone)
    git = lambda *words: subprocess.run(["git", *words], cwd=clone, check=True, capture_output=True)  # noqa: E731
    git("init")
    git("add", "pretrain_gpt.py", "pretrain_hybrid.py", "megatron/core/package_info.py")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-m", "release")
    apply = patcher()
    before = (clone / "pretrain_gpt.py").read_bytes()
    apply.run(clone)
    assert (clone / "pretrain_gpt.py").read_bytes() != before
    apply.run(clone, revert=True)
    assert (clone / "pretrain_gpt.py").read_bytes() == before
    with (clone / "megatron" / "core" / "package_info.py").open("a") as file:
        file.write("\n")
    with pytest.raises(apply.RefusedError, match=r"uncommitted changes \(megatron/core/package_info.py\)"):
        apply.run(clone)


def test_hybrid_models(folder, checkout, patched):
    stock = ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    wanted = train(folder, "stock hybrid", 1, *PATTERN, *stock, script=str(checkout / "pretrain_hybrid.py"))
    assert wanted["lm loss 5"] < 0.9 * wanted["lm loss 1"]
    launched = train(folder, "hybrid", 4, *HYBRID, script=str(checkout / "pretrain_hybrid.py"))
    assert_close(launched, wanted)
    script = str(patched / "pretrain_hybrid.py")
    assert_close(train(folder, "patched hybrid", 4, *HYBRID, script=script, launcher=False), wanted)
