"""``patches/apply.py`` on made-up checkouts; real ones in ``tests/end_to_end/test_checkout.py``."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[2] / "patches"
VERSIONS = ("0.18", "0.19")


@pytest.fixture
def apply():
    spec = importlib.util.spec_from_file_location("apply", PATCHES / "apply.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path, apply, monkeypatch):
    """Two scripts of 30 lines that count as a release of 0.19."""
    folder = tmp_path / "Megatron LM"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 7\n")
    known = {}
    for name in apply.KNOWN["0.19"]:
        (folder / name).write_text("".join(f"x = {i}  # {name}\n" for i in range(30)))
        known[name] = apply.content_hash((folder / name).read_bytes())
    monkeypatch.setitem(apply.KNOWN, "0.19", known)
    return folder


def lines(path):
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_patches_only_insert_and_carry_no_other_text(apply, version):
    files = {}
    for line in lines(PATCHES / f"core_v{version}.x.patch"):
        if line.startswith("+++ b/"):
            hunk = files.setdefault(line[6:].strip(), [])
        elif line.startswith("@@"):
            assert re.fullmatch(r"@@ -\d+,0 \+\d+,4 @@\n", line)
        elif not line.startswith("---"):
            assert line.startswith("+"), line
            hunk.append(line[1:])
    assert set(files) == set(apply.KNOWN[version])
    assert all("".join(hunk) == apply.INSERTED for hunk in files.values())


def test_there_and_back(apply, checkout, capsys):
    before = {name: (checkout / name).read_bytes() for name in apply.KNOWN["0.19"]}
    assert apply.main([str(checkout), "--check"]) == 0 and "is not patched" in capsys.readouterr().out
    assert apply.main([str(checkout)]) == 0 and "is patched; try: torchrun" in capsys.readouterr().out
    script = (checkout / "pretrain_gpt.py").read_text()
    assert script.splitlines()[20].startswith("from megatron_upipe.patched import") and script.count("x = ") == 30
    assert apply.main([str(checkout)]) == 0 and capsys.readouterr().out.strip().endswith("is patched")
    assert apply.main([str(checkout), "--revert"]) == 0 and "is as it was" in capsys.readouterr().out
    assert {name: (checkout / name).read_bytes() for name in before} == before


def test_inside_another_repository(apply, checkout):
    """git must not take the paths for those of a repository around the checkout."""
    subprocess.run(["git", "init", "-q"], cwd=checkout.parent, check=True)
    assert "is patched; try" in apply.run(checkout)


def test_unknown_and_half_patched_scripts_are_refused(apply, checkout, capsys):
    script = checkout / "pretrain_gpt.py"
    content = script.read_text()
    script.write_text(content + "mine = True\n")
    assert apply.main([str(checkout)]) == 2
    refusal = capsys.readouterr().err
    assert "pretrain_gpt.py is not that of a release of 0.19; run it through the launcher" in refusal
    assert "install_into_script(__name__)" in refusal and script.read_text() == content + "mine = True\n"
    script.write_text(apply.INSERTED + content)
    with pytest.raises(apply.RefusedError, match=r"only some of pretrain_gpt.py, .* are patched"):
        apply.run(checkout)


def test_other_folders_are_refused(apply, checkout, tmp_path):
    with pytest.raises(apply.RefusedError, match=r"is no Megatron-LM checkout: it has no megatron/core/package_info"):
        apply.run(tmp_path)
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\n")
    with pytest.raises(apply.RefusedError, match=r"is Megatron-LM 0\.17; there are patches for 0\.18 and 0\.19"):
        apply.run(checkout)
