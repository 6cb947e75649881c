"""When a run is compiled, and where the compiled code is kept."""

import os

from vit.training.compilation import keep_compiled_code, should_compile


def test_only_long_runs_on_known_devices_are_compiled():
    assert should_compile("cpu", total_flops=1e16)
    assert not should_compile("cpu", total_flops=1e13)
    assert should_compile("cpu", total_flops=2e14)
    assert not should_compile("cpu", total_flops=2e14, num_sizes=2)
    assert should_compile("cuda", total_flops=1e18)
    assert not should_compile("xpu", total_flops=1e18)


def test_without_a_compiler_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "c++")
    assert not should_compile("cpu", total_flops=1e18)


def test_compiled_code_is_kept_unless_the_user_chose_another_place(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    keep_compiled_code(tmp_path / "other")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
