"""The GPU benchmark in miniature on the CPU: the same functions and processes at tiny sizes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from areal_agents.training.model import fused
from benchmarks.__main__ import app
from benchmarks.gpu import kernels, memory, run, runs
from benchmarks.gpu.device import why_no_gpu
from benchmarks.gpu.parts import PARTS, Here, Skipped, measure
from benchmarks.gpu.run import Outcome, run_parts, write
from benchmarks.gpu.scale import MINIATURE


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here("cpu", MINIATURE, tmp_path)


def test_every_part_has_a_function_and_a_limit_within_the_total_time() -> None:
    for part in PARTS.values():
        module = importlib.import_module(f"benchmarks.gpu.{part.module}")
        assert callable(getattr(module, part.function)) and part.limit_s <= run.WHOLE_S


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_is_compared_with_dense_masks_and_timed(here: Here) -> None:
    figures = measure("attention", here)
    assert figures["error_documents_float32"] < 2e-4 and figures["error_tree_float32"] < 2e-4
    assert figures["documents_ms"] > 0 and figures["tree_ms"] > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_that_differs_from_dense_masks_fails(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.gpu_attention
    monkeypatch.setattr(kernels, "gpu_attention", lambda *a, **k: right(*a, **k) * 1.01)
    with pytest.raises(AssertionError, match="differs from dense masks by"):
        measure("attention", here)


def test_logprobs_of_a_bfloat16_head_are_compared_with_float64(here: Here) -> None:
    assert measure("head", here)["logprob_error"] < 1e-3


def test_a_step_is_timed_and_profiled(here: Here) -> None:
    figures = measure("step", here)
    assert figures["tokens_per_s"] > 0 and figures["mfu"] is None and figures["peak_gib"] is None
    shares = list(figures["profile"].values())
    assert shares == sorted(shares, reverse=True) and 0.2 < sum(shares) <= 1.01


@pytest.mark.slow
def test_steps_with_fused_blocks_are_compared(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BACKEND", "aot_eager")  # the C++ compiler takes minutes
    figures = measure("fused", here)
    assert figures["none_tokens_per_s"] > 0 and figures["compile_tokens_per_s"] > 0
    assert figures["none_norm_difference"] == 0 and figures["compile_norm_difference"] < 0.02
    assert "needs a GPU" in figures["liger_skipped"]


def test_on_a_cpu_the_memory_of_steps_is_only_estimated(here: Here) -> None:
    figures = measure("memory", here)
    assert list(figures) == ["whole", "recomputed", "offloaded", "adapter"]
    assert all(case["estimated_gib"] >= 0 and "measured_gib" not in case for case in figures.values())


def test_an_inaccurate_memory_estimate_fails() -> None:
    for estimated, measured in ((84, 100), (116, 100)):
        with pytest.raises(AssertionError, match=r"whole: the estimate is .* difference of at most 15%"):
            memory._judged("whole", estimated * 2**20, measured * 2**20)
    assert memory._judged("whole", 2**30, round(1.1 * 2**30)) == {"measured_gib": 1.1, "error": -0.091}


def test_a_model_is_published_to_an_engine_in_another_process(here: Here) -> None:
    figures = measure("publish", here)
    assert figures["publish_s"] > figures["pause_s"] >= 0


def test_shared_prefixes_are_compared_with_their_bound(here: Here) -> None:
    figures = measure("prefixes", here)
    assert figures["bound"] > 2 and figures["speed_up"] > 0
    assert figures["share_of_bound"] == pytest.approx(figures["speed_up"] / figures["bound"], abs=0.01)


def test_an_engine_sleeps_and_samples_the_same_tokens_afterwards(here: Here) -> None:
    figures = measure("engine", here)
    assert figures["tokens_per_s"] > 0 and "released_gib" not in figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "lora", "ipc", "large", "quickstart"])
def test_whole_runs_are_measured(name: str, here: Here) -> None:
    figures = measure(name, here)
    assert figures["steps"] == (3 if name == "large" else 1) and figures["step_s"] > 0
    assert figures["engine_against_trainer"] < 0.02


def row(**changed: Any) -> str:
    """Return a line of metrics.jsonl."""
    times = {"step_s": 2.0, "train_s": 1.0, "publish_s": 0.5, "pause_s": 0.25}
    return json.dumps(
        {"tokens": 9, "grad_norm": 1.0, "logprob_diff_on_policy_mean": 0.01, **times, **changed}
    )


def test_a_run_fails_if_engine_and_trainer_differ_or_nothing_was_trained(tmp_path: Path) -> None:
    def summary(*rows: str, dtype: str = "bfloat16") -> dict[str, Any]:
        (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
        return runs._summary(tmp_path, dtype)

    found = summary(row(), row(logprob_diff_on_policy_mean=None, step_s=3.0))
    assert found == {
        "steps": 2, "step_s": 3.0, "train_s": 1.0, "publish_s": 0.5, "pause_s": 0.25,
        "engine_against_trainer": 0.01,
    }  # fmt: skip
    with pytest.raises(AssertionError, match=r"differ by 1\.0e-02 nats a token in float32"):
        summary(row(), dtype="float32")
    with pytest.raises(AssertionError, match="no token was trained"):
        summary(row(tokens=0))
    with pytest.raises(AssertionError, match="gradient norms are"):
        summary(row(grad_norm=None))


def test_the_part_whose_engine_sleeps_is_skipped_on_a_cpu(here: Here) -> None:
    with pytest.raises(Skipped, match="shares no memory"):
        measure("sleep", here)


def test_on_a_gpu_small_runs_are_measured_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    together, counting, running, most = threading.Barrier(2), threading.Lock(), 0, 0

    def part(name: str, device: str, left_s: float, interrupted: threading.Event, temporary: str) -> Outcome:
        nonlocal running, most
        with counting:
            running += 1
            most = max(most, running)
        if PARTS[name].beside:
            together.wait(timeout=60)  # returns only if the other part has begun
        with counting:
            running -= 1
        return Outcome(name, "passed", 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "_run_part", part)
    names = ["head", "loop", "sleep", "publish"]
    assert [outcome.part for outcome in run_parts(names, "cuda")] == names
    assert most == 2


class Clock:
    """Replaces `time` in a module: a clock that advances only by the size of a file, in seconds."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return float(self._file.stat().st_size) if self._file.exists() else 0.0


def test_a_failed_or_hanging_part_does_not_prevent_the_others_while_time_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, tempfile, time\n"
        "if sys.argv[1:2] == ['head']: raise SystemExit('the head is broken')\n"
        "if sys.argv[1:2] == ['step']:\n"
        "    tempfile.mkstemp()\n"
        f"    with open({str(tmp_path / 'clock')!r}, 'a') as clock: clock.write('.....')\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setattr(run, "time", Clock(tmp_path / "clock"))  # 5 s pass while the step hangs
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "_path", lambda: f"{tmp_path}:{run.ROOT}")
    monkeypatch.setitem(PARTS, "step", replace(PARTS["step"], limit_s=5))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    failed, hanging, skipped = run_parts(["head", "step", "sleep"], "cpu")
    assert not list((tmp_path / "temporary").iterdir())
    assert failed.status == "failed" and "the head is broken" in failed.reason
    assert hanging.status == "failed" and "was not done after 5 s" in hanging.reason
    assert hanging.seconds == 5
    assert skipped.status == "skipped" and "shares no memory" in skipped.reason
    monkeypatch.setattr(run, "LEAST_S", 1.0)
    monkeypatch.setitem(PARTS, "step", replace(PARTS["step"], limit_s=60))
    assert run.run(tmp_path / "gpu", device="cpu", parts=["step", "head"], within_s=5) == 0
    cut, late = json.loads((tmp_path / "gpu" / "gpu.json").read_text())["parts"]
    assert cut["status"] == "not run" and "no time left after 5 s" in cut["reason"] and cut["seconds"] == 5
    assert late["status"] == "not run" and late["reason"] == "no time left of 5 s"
    assert "Not run, because no time was left: step, head." in capsys.readouterr().out


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_running_part_and_no_other_part_begins(
    by: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys, time\nopen({str(begun)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(run, "_path", lambda: f"{tmp_path}:{run.ROOT}")
    ended = threading.Event()

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not ended.wait(0.01) and time.monotonic() < deadline:
            if begun.exists() and begun.read_text().endswith(" "):
                signal.pthread_kill(threading.main_thread().ident or 0, by)
                return

    # a background process of a shell ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt, daemon=True)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_parts(["head", "step"], "cpu")
    finally:
        ended.set()
        sender.join(60)
        signal.signal(signal.SIGINT, before)
    (pid,) = map(int, begun.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_figures_are_written_as_json_and_as_a_table(tmp_path: Path) -> None:
    outcomes = [
        Outcome("step", "passed", 12.5, {"tokens_per_s": 31_000, "mfu": 0.47, "profile": {"gemm": 0.5}}),
        Outcome("sleep", "skipped", 0.0, reason="it does | not apply"),
    ]
    write(outcomes, {"device": "NVIDIA H100", "torch": "2.11.0+cu130"}, tmp_path / "gpu")
    found: dict[str, Any] = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert found["machine"]["device"] == "NVIDIA H100"
    assert found["parts"][0]["figures"]["mfu"] == 0.47 and found["parts"][1]["status"] == "skipped"
    assert (tmp_path / "gpu" / "gpu.md").read_text().splitlines() == [
        "NVIDIA H100 (torch 2.11.0+cu130).",
        "",
        "| part | outcome | figures |",
        "| --- | --- | --- |",
        "| one step of a 1.7B model | passed | tokens_per_s 31,000; mfu 0.47; profile (gemm: 0.5) |",
        "| a run whose engine sleeps while a step is trained | skipped | it does \\| not apply |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_nothing_is_measured_and_the_status_is_0(tmp_path: Path) -> None:
    assert why_no_gpu() is not None
    result = CliRunner().invoke(app, ["gpu", "--out", str(tmp_path / "gpu")])
    assert result.exit_code == 0 and not (tmp_path / "gpu").exists()
    assert result.output.startswith(f"Nothing was measured on a GPU: {why_no_gpu()}")
