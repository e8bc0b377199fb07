"""`stepformer bench`: what is measured, stored, tabled and judged; on a CPU, with models that take seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import against
import stepformer
import targets
from stepformer.base.errors import InputError
from stepformer.cli import bench, main
from stepformer.cli.main import parser
from stepformer.measure.benchmark import measuring, records
from stepformer.measure.benchmark.planning import BASELINE, BenchSettings, Wanted, plan
from stepformer.measure.benchmark.process import carry_out
from stepformer.measure.benchmark.table import newest, page, speed_table
from stepformer.measure.benchmark.timing import Limit, group_of, own_kernels, spread, timed
from targets import judged

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHAPE = ("n_layer=1", "n_head=2", "d_model=16", "vocab_size=64")
BARE = """
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "triton")))  # None: importing them fails
from stepformer.cli import main
sys.exit(main(sys.argv[1:]))
"""
QUICK = ("--context", "16", "--micro-batch", "2", "--steps", "3", "--decode-tokens", "4")


def quick_settings(**changes: Any) -> BenchSettings:
    values: dict[str, Any] = {"device": CPU, "size": "tiny", "steps": 3, "warmup": 1, "compile": False}
    values |= {"kernels": ("none",), "micro_batch": 2, "decode_tokens": 4, "prompt_tokens": 4, "batch_tokens": 128}
    return BenchSettings(**{**values, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "way", "compiled"),
    [
        ("yurii", (), "on", False),
        ("symp-presymp-euler", (), "on", False),
        ("linear-symp-ab2", (), "on", False),
        ("symp-presymp-euler", (), "off", True),
        ("symp-presymp-euler", ("mlp_step=A", "n_layer=2"), "on", False),
    ],
)
def test_integrators_without_kernels_are_compiled(
    name: str, changes: tuple[str, ...], way: str, compiled: bool
) -> None:
    settings = quick_settings(device=torch.device("cuda"), compile=None, kernels=(way,))
    case = plan([Wanted(name, (*SHAPE, *changes), 16)], settings)[-1]
    assert case.label.startswith(name)
    assert case.compiled(settings) is compiled
    assert not case.compiled(quick_settings(compile=None))


def quick_cases(*names: str, settings: BenchSettings | None = None) -> list[Any]:
    return plan([Wanted(name, SHAPE, 16) for name in names], settings or quick_settings())


def made_up(label: str, speed: float, *, preset: str = "vanilla", context: int = 1024, **more: Any) -> dict[str, Any]:
    """A record as it would be stored, from one number."""
    times = spread([32 * 1024 / speed * 1000] * 3)
    return {
        "label": label,
        "config": stepformer.model_config(preset, context=context).to_dict(),
        "context": context,
        "micro_batch": 32,
        "kernels": "on",
        "streams": "bf16",
        "notes": [],
        "error": None,
        "flops_per_token": 0.86e9,
        "tokens_per_second": speed,
        "forward_backward": times,
        "memory": {"peak_bytes": 9 * 2**30, "how": "measured"},
        "mfu": 0.5,
        "mfu_of": "H200 data sheet, bf16",
        "of_product": 0.6,
        **more,
    }


def made_up_process(
    *results: dict[str, Any], date: str = "2026-11-20T10:00:00+00:00", steps: int = 20
) -> dict[str, Any]:
    return {
        "date": date,
        "commit": {"hash": "0123456789abcdef", "changed": False},
        "versions": {"torch": "2.11", "triton": "3.6", "python": "3.12"},
        "device": {"kind": "cuda", "name": "NVIDIA H200", "driver": "580"},
        "settings": {"size": "small", "compile": True, "batch_tokens": 491_520, "optimizer": "muon", "steps": steps},
        "product": {"dtype": "bfloat16", "size": 8192, "flops": 788e12},
        "results": list(results),
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the command has written: two architectures, profiled, vanilla again at the end."""
    path = tmp_path_factory.mktemp("bench") / "speed.json"
    assert main(["bench", "yurii", *SHAPE, *QUICK, "--profile", "--again", "--json", str(path)]) == 0
    return path


def test_a_file_says_what_was_measured_on_what(stored: Path) -> None:
    [process] = records.read(stored)
    assert process["versions"]["torch"] == torch.__version__
    assert process["device"]["kind"] == "cpu"
    assert process["device"]["threads"] == torch.get_num_threads()
    assert process["settings"]["size"] == "tiny"
    assert process["product"]["flops"] > 0
    assert process["date"].startswith("20")
    assert [record["label"] for record in process["results"]] == [
        "vanilla",
        "yurii",
        "vanilla (again)",
    ]
    for record in process["results"]:
        assert record["error"] is None
        assert (record["context"], record["micro_batch"]) == (16, 2)
        times = record["forward_backward"]
        assert len(times["ms"]) == 3
        assert times["min_ms"] <= times["q1_ms"] <= times["median_ms"] <= times["q3_ms"] <= times["max_ms"]
        assert record["tokens_per_second"] == pytest.approx(32_000 / times["median_ms"])
        assert record["of_product"] == pytest.approx(
            record["tokens_per_second"] * record["flops_per_token"] / process["product"]["flops"]
        )
        assert record["memory"]["how"] == "estimated"
        assert record["decode"]["tokens"] == 4
        assert record["decode"]["rows"] == 1
        assert record["decode"]["tokens_per_second"] > 0
        assert len(record["profile"]["top"]) <= 25
        assert sum(record["profile"]["groups_ms"].values()) == pytest.approx(record["profile"]["counted_ms"])


def test_a_whole_step_is_made_of_its_parts(stored: Path) -> None:
    """4,096 tokens in micro-batches of 32: one that writes gradients, 127 that add to them, one optimizer step."""
    for record in records.read(stored)[0]["results"]:
        batch = record["batch"]
        first, added = record["forward_backward"]["median_ms"], record["accumulating"]["median_ms"]
        assert batch["micro_batches"] == 128
        assert batch["ms"] == pytest.approx(first + 127 * added + record["optimizer"]["median_ms"])
        assert batch["optimizer_share"] == pytest.approx(record["optimizer"]["median_ms"] / batch["ms"])
        assert record["full_step"]["median_ms"] > 0


def test_a_ratio_on_the_cpu_is_of_steps_taken_in_turn(stored: Path) -> None:
    vanilla, yurii, again = records.read(stored)[0]["results"]
    assert "beside" not in vanilla
    for record in (yurii, again):
        assert len(record["beside"]["ms"]) == len(record["forward_backward"]["ms"])
        expected = record["beside"]["median_ms"] / record["forward_backward"]["median_ms"]
        assert records.value_of("ratio", record, vanilla) == pytest.approx(expected)


def test_numbers_stand_on_one_line(stored: Path) -> None:
    text = stored.read_text()
    assert json.loads(text)["format"] == records.FORMAT
    assert len(text.splitlines()) < 1500  # three profiles of 25 kernels, not a line per number
    assert '"ms": [' in text


def test_appending_keeps_what_a_file_holds(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    path.write_text(stored.read_text())
    assert main(["bench", "vanilla", *QUICK, "--no-step", "--no-decode", "--append", str(path)]) == 0
    before, added = records.read(path)
    assert before == records.read(stored)[0]
    assert [record["label"] for record in added["results"]] == ["vanilla"]
    assert "optimizer" not in added["results"][0]
    assert "decode" not in added["results"][0]


def test_json_on_standard_output_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vanilla", *QUICK, "--no-step", "--no-decode", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["processes"][0]["results"][0]["label"] == "vanilla"


def test_the_first_line_says_where_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hb", *QUICK, "--no-step", "--no-decode", "--device", "cpu"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"on {torch.get_num_threads()} CPU thread" in first
    assert "size tiny" in first
    assert "kernels are not used here" in first


@pytest.mark.slow
def test_it_works_without_matplotlib_and_triton(tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    path_of_code = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command_line = [sys.executable, "-c", BARE, "bench", "yurii", *SHAPE, *QUICK, "--json", str(path)]
    done = subprocess.run(command_line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path_of_code})
    assert done.returncode == 0, done.stderr
    assert "architecture" in done.stdout
    assert len(records.read(path)[0]["results"]) == 2
    assert "No CUDA device" in done.stdout or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["yurri"], "Did you mean 'yurii'?"),
        (["--json", "yurii"], "should end in .json"),
        (["yurii", "--all"], "Give --all or names, not both."),
        (["--steps", "2"], "--steps 2 should be at least 3."),
        (["--streams", "bf16"], "on the CPU nothing runs in bf16"),
        (["--table", "nowhere"], "There is no benchmark result 'nowhere'."),
        (["yurii", "size=small"], "--size small"),
        (["yurii", "context=8", "--context", "16"], "Two contexts"),
        (["yurii", "preset=hb"], "`preset` is the NAME itself"),
        (["-o", "page.md"], "-o belongs to --table"),
        (["--seconds", "0"], "--seconds 0 should be above 0."),
        (["--json", "a.json", "--append", "b.json"], "not both"),
        (["--append", str(ROOT / "pyproject.toml")], "is damaged: it is not valid JSON."),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_the_baseline_has_the_shape_of_whom_it_is_compared_with() -> None:
    settings = quick_settings(kernels=("on", "off"))
    cases = plan([Wanted("yurii", ("d_model=64", "splitting=strang")), Wanted("adam"), Wanted("vanilla")], settings)
    assert len({case.frame for case in cases}) == 4  # two widths, two ways
    for i, case in enumerate(cases):
        first = next(other for other in cases if other.frame == case.frame)
        assert first.label == BASELINE
        assert first.config.splitting == "lie-trotter"
        assert first.config.d_model == case.config.d_model
        assert cases.index(first) <= i
    assert [case.label for case in cases].count("vanilla") == 4
    assert "yurii splitting=strang" in [case.label for case in cases]


def test_all_is_every_preset_once_under_its_short_name() -> None:
    wanted = bench.wanted(parser("bench").parse_args(["bench", "--all"]))
    cases = plan(wanted, quick_settings())
    assert len(cases) == len(stepformer.presets())
    assert cases[0].label == "vanilla"
    assert "yurii" in [case.label for case in cases]


def test_what_fails_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring._Bench.forward_backward

    def breaks(self: Any) -> None:
        if self.case.config.template == "nesterov":
            raise RuntimeError("ptxas fell over\nwith a long story")
        real(self)

    monkeypatch.setattr(measuring._Bench, "forward_backward", breaks)
    cases, saved = quick_cases("yurii", "hb"), []
    process, interrupted = carry_out(cases, quick_settings(), lambda p: saved.append(len(p["results"])))
    assert not interrupted
    assert saved == [0, 1, 2, 3]
    errors = [record["error"] for record in process["results"]]
    assert errors == [None, "failed: RuntimeError: ptxas fell over", None]
    table = speed_table(list(records.pairs(process["results"])))
    assert "failed" in [cell.text for cell in table.rows[1]]
    assert any("ptxas" in note for note in table.notes)
    assert "with a long story" not in table.plain()


@pytest.mark.slow
def test_a_micro_batch_that_does_not_fit_is_halved_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring._Bench.full_step

    def large(self: Any) -> None:
        if self.case.micro_batch > 16:
            raise torch.OutOfMemoryError("too much")
        real(self)

    monkeypatch.setattr(measuring._Bench, "full_step", large)
    settings = quick_settings(micro_batch=None)  # 1,024 tokens on a CPU: 64 sequences of 16
    record: dict[str, Any] = {}
    measuring.measure(quick_cases("vanilla", settings=settings)[0], settings, 1e9, record)
    assert record["micro_batch"] == 16
    assert record["error"] is None
    assert record["notes"] == ["micro-batch 32 did not fit; measured at 16"]
    assert record["tokens_per_second"] == pytest.approx(1000 * 16 * 16 / record["forward_backward"]["median_ms"])
    settings = quick_settings(micro_batch=64)
    measuring.measure(quick_cases("vanilla", settings=settings)[0], settings, 1e9, record)
    assert record["error"] == "out of memory at micro-batch 64."


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring._Bench.decoding

    def stops(self: Any) -> None:
        if self.case.config.template == "heavy-ball":
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(measuring._Bench, "decoding", stops)
    saved: list[int] = []
    process, interrupted = carry_out(
        quick_cases("hb", "yurii"), quick_settings(), lambda p: saved.append(len(p["results"]))
    )
    assert interrupted
    assert saved == [0, 1, 2]
    last = process["results"][-1]
    assert last["tokens_per_second"] > 0
    assert last["notes"] == ["interrupted"]


def test_a_limit_leaves_out_the_rest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = quick_settings(seconds=1e-9, steps=50)
    record: dict[str, Any] = {}
    measuring.measure(quick_cases("vanilla", settings=settings)[0], settings, 1e9, record)
    assert len(record["forward_backward"]["ms"]) == 3
    assert "full_step" not in record
    assert "decode" not in record
    assert len(record["notes"]) == 2
    assert all("limit of 1e-09 s was reached" in note for note in record["notes"])


def test_limits_and_spreads() -> None:
    assert Limit(None).affords(20, 1e9) == 20
    assert Limit(10).affords(20, 1000) == 9
    assert Limit(0.001).affords(20, 1000) == 3
    assert Limit(0.001).affords(2, 1000) == 2
    found = spread([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found["min_ms"], found["q1_ms"], found["median_ms"], found["q3_ms"], found["max_ms"]) == (1, 2, 3, 4, 100)
    assert spread([2.0])["q3_ms"] == 2.0
    calls: list[int] = []
    assert len(timed(lambda: calls.append(1), 4, CPU)) == len(calls) == 4


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3i_64x64x64", "attention"),
        ("triton_red_fused__log_softmax_nll_loss_forward_12", "loss"),
        ("triton_poi_fused_gelu_7", "elementwise by inductor"),
        ("Memcpy DtoD (Device -> Device)", "memory copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::addmm", "matrix products"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_our_own_kernels_are_known_by_the_file_they_are_in() -> None:
    for name, home in own_kernels().items():
        assert (ROOT / f"src/stepformer/ops/{home}.py").is_file()
        assert group_of(name) == f"kernel: {home.lstrip('_')}"


def test_every_target_names_presets_and_quantities_that_exist() -> None:
    rows = [target.row for target in targets.TARGETS]
    assert len(set(rows)) == len(rows)
    full = made_up("vanilla", 600e3, batch={"optimizer_share": 0.01}, decode={"tokens_per_second": 4000.0})
    for target in targets.TARGETS:
        assert records.value_of(target.quantity, full, full) is not None
        for name in target.presets:
            stepformer.preset(name)
    judged_presets = {stepformer.preset(name).name for target in targets.TARGETS for name in target.presets}
    # what the table of targets does not name: a first-order step in parallel, and triple momentum from zero
    assert set(stepformer.presets()) - judged_presets == {"gd-euler", "tmm-zero"}


def test_targets_are_reached_by_the_ratio_in_the_same_process() -> None:
    slow = made_up_process(made_up("vanilla", 500e3), made_up("yurii", 490e3), date="2026-11-20")
    fast = made_up_process(
        made_up("vanilla", 610e3, batch={"optimizer_share": 0.012}, decode={"tokens_per_second": 5000.0}),
        made_up("nesterov-lie-trotter", 580e3, decode={"tokens_per_second": 4400.0}),
        made_up("verlet-ama", 430e3, flops_per_token=0.86e9 / 0.75),
        made_up("linear", 700e3, context=8192),
        made_up("vanilla", 500e3, context=8192),
        date="2026-11-21",
    )
    found = {(v.target.row, v.preset): v for v in judged([slow, fast])}
    assert found["vanilla", "vanilla"].reached is True
    assert found["vanilla-memory", "vanilla"].reached is True
    assert found["momentum", "yurii"].value == pytest.approx(580 / 610)
    assert found["momentum", "yurii"].reached is False
    assert found["momentum", "hb"].reached is None
    assert found["optimizer", "vanilla"].reached is False
    assert found["decode-momentum", "yurii"].value == pytest.approx(0.88)
    assert found["decode-momentum", "yurii"].reached is False
    assert found["two-calls", "verlet-ama"].value == pytest.approx(430 / 610 / 0.75)
    assert found["two-calls", "verlet-ama"].reached is False
    assert found["linear-8192", "linear"].value == pytest.approx(1.4)
    assert found["linear-8192", "linear"].reached is True
    assert found["linear", "linear"].reached is None
    assert {v.target.row for v in judged([slow], targets.select("muon,soap"))} == {"muon", "soap"}
    with pytest.raises(KeyError, match="Did you mean 'muon'"):
        targets.select("moun")


def test_rows_without_kernels_do_not_count_for_the_targets() -> None:
    process = made_up_process(made_up("vanilla", 610e3), made_up("vanilla", 400e3, kernels="off"))
    assert judged([process])[0].value == pytest.approx(610)


def test_the_page_shows_the_newest_of_everything(tmp_path: Path) -> None:
    old = made_up_process(made_up("vanilla", 500e3), made_up("yurii", 480e3), made_up("muon", 300e3), date="2026-11-20")
    failed = made_up("muon", 1.0, error="compiling failed: X: y")
    del failed["tokens_per_second"]
    new = made_up_process(made_up("vanilla", 600e3), made_up("yurii", 570e3), failed, date="2026-11-21")
    folder = tmp_path / "results"
    records.write(folder / "b.json", [new])
    records.write(folder / "a.json", [old])
    long = made_up_process(made_up("vanilla", 350e3, context=8192), date="2026-11-19")
    short = made_up_process(made_up("yurii", 999e3, decode={"tokens_per_second": 5.0}), date="2026-11-22", steps=3)
    records.write(folder / "c.json", [long, short])
    stored = records.read_all(folder)
    speeds = {r["label"]: r["tokens_per_second"] for r, _ in newest(stored) if r["context"] == 1024}
    # neither a failure nor a few steps hide an older number
    assert speeds == {"vanilla": 600e3, "yurii": 570e3, "muon": 300e3}
    text = re.sub(" +", " ", page(stored))
    assert "## NVIDIA H200, size small, compiled" in text
    assert "| yurii | 1024 | 570.0 | 0.950 |" in text
    assert "| muon | 1024 | 300.0 | 0.600 |" in text
    assert "in 2 of them: 500.0 to 600.0 ktok/s" in text
    assert targets.main(["--results", str(folder), "-o", str(tmp_path / "TARGETS.md")]) == 0
    judgement = re.sub(" +", " ", (tmp_path / "TARGETS.md").read_text())
    assert "| vanilla | vanilla | ktok/s | reached | >= 600.0 | 600.0 |" in judgement
    assert "| momentum | yurii | ratio | NOT reached | >= 0.960 | 0.950 |" in judgement
    out = tmp_path / "README.md"
    assert main(["bench", "--table", str(folder), "-o", str(out)]) == 0
    assert out.read_text() == page(stored)


def test_a_newer_measurement_counts_also_if_it_is_of_few_rows() -> None:
    """Beside the vanilla of its own process; vanilla's own speed is that of the process with the most rows. Of several
    ways to store streams the first one counts."""
    several = [made_up(name, 480e3) for name in ("muon", "adam", "adamw")]
    first = made_up_process(made_up("vanilla", 600e3), made_up("yurii", 570e3), *several, date="2026-11-20")
    both = [made_up("muon", 450e3), made_up("muon", 100e3, streams="fp32")]
    wide = made_up("vanilla", 400e3, streams="fp32")
    again = made_up_process(made_up("vanilla", 500e3), wide, *both, date="2026-11-21")
    found = {(v.target.row, v.preset): v.value for v in judged([again, first])}
    assert found["muon", "muon"] == pytest.approx(0.9)
    assert found["vanilla", "vanilla"] == 600.0
    assert found["momentum", "yurii"] == pytest.approx(0.95)


def test_a_quick_vanilla_does_not_hide_a_full_one() -> None:
    """Every process measures vanilla to compare with, not every one decodes."""
    whole = made_up("vanilla", 590e3, decode={"tokens_per_second": 5000.0}, batch={"optimizer_share": 0.007})
    stored = [made_up_process(whole), made_up_process(made_up("vanilla", 600e3), made_up("muon", 480e3))]
    by_label = {record["label"]: record for record, _ in newest(stored)}
    assert by_label["vanilla"]["tokens_per_second"] == 600e3
    assert by_label["vanilla"]["decode"] is whole["decode"]
    found = {(v.target.row, v.preset): v.value for v in judged(stored)}
    assert found["decode", "vanilla"] == 5000.0
    assert found["optimizer", "vanilla"] == pytest.approx(0.7)
    assert found["vanilla", "vanilla"] == 600.0  # the last that measured it
    assert found["muon", "muon"] == pytest.approx(0.8)


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    folder = ROOT / "benchmarks"
    assert list((folder / "results").glob("*.json"))
    assert (folder / "README.md").read_text() == page(records.read_all(folder / "results"))


def test_other_files_are_not_taken_for_results(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": 7}')
    with pytest.raises(InputError, match="is not a result of"):
        records.read(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no JSON files"):
        records.read_all(tmp_path / "empty")
    assert records.finite({"a": [float("nan"), 1.0], "b": float("inf")}) == {"a": [None, 1.0], "b": None}


def test_a_narrow_terminal_misses_the_spare_columns() -> None:
    table = speed_table([(made_up("vanilla", 600e3), made_up("vanilla", 600e3))])
    names, narrow = ([column.title for column in found.columns] for found in (table, table.fitting(50)))
    assert "ms [q1, q3]" in names
    assert "ms [q1, q3]" not in narrow
    assert {"architecture", "ktok/s", "ratio"} <= set(narrow)
    assert max(map(len, table.fitting(50).plain().splitlines())) <= 50
    assert table.fitting(500) == table


@pytest.mark.slow
def test_against_takes_steps_of_two_checkouts_in_turn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The other one is this one as well."""
    path = tmp_path / "ratio.json"
    words = ["vanilla", *SHAPE, "context=16", "--micro-batch", "2", "--steps", "3", "--rounds", "1", "--kinds", "1"]
    assert against.main([str(ROOT / "src"), *words, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    [entry] = found["measured"]
    assert (entry["name"], entry["kind"]) == ("vanilla", "forward + backward")
    assert len(entry["there_ms"]) == len(entry["here_ms"]) == 3
    assert "ratio [low, high]" in capsys.readouterr().out


def test_mistakes_of_the_maintainers_tools(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert against.main(["nowhere"]) == 2
    assert "no package stepformer in 'nowhere'" in capsys.readouterr().err
    assert targets.main([]) == 2
    assert "The targets are for a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("print('\"elsewhere/stepformer/__init__.py\"')", "another folder"),
        ("exit('no such key')", "failed: no such key"),
    ],
)
def test_a_checkout_that_cannot_be_measured_is_a_sentence(program: str, sentence: str, tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process,
        pytest.raises(stepformer.StepformerError, match=sentence),
    ):
        against.Worker(tmp_path, process)


def test_the_ratio_against_another_checkout() -> None:
    entries = [
        {"name": "hb", "kind": "optimizer", "there_ms": [2.0] * 6, "here_ms": [1.0, 1.0, 1.0, 1.0, 4.0, 4.0]},
        # every second step finds its caches warm: neither side gains by it
        {"name": "hb", "kind": "optimizer", "there_ms": [1.0, 5.0, 1.0, 5.0], "here_ms": [3.0, 1.0, 3.0, 1.0]},
    ]
    table = against.table({"measured": entries})
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["hb", "optimizer", "2.00", "2.00", "1.500 [1.500, 2.000]", "1.000"]
    ]
