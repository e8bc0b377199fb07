"""Studies: one architecture in four forms, baselines made as large as a row, the same search for all rows."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stepformer as sf
from stepformer.base.errors import ConfigError, InputError, StepformerError
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.model import Model
from stepformer.study import Comparison, Facts, load_records
from stepformer.study.comparison import compare as compare_records
from stepformer.study.fairness import matched, search_left, search_of, with_matches, with_tuning
from stepformer.study.grids import at_the_edge, grid_points
from stepformer.study.plots import draw_comparison
from stepformer.study.study import Planned
from stepformer.training import RunConfig, run_config
from stepformer.training.loop import Trainer
from stepformer.training.runs import as_toml
from stepformer.training.speed import flops_per_token
from stepformer.training.stopping import Watch

SIZES = {"n_layer": 1, "n_head": 2, "d_model": 16, "context": 16}
SETTINGS: dict[str, Any] = {**SIZES, "batch": 4, "eval_tokens": 256, "device": "cpu", "steps": 6}


@pytest.fixture
def settings(corpus: Path) -> dict[str, Any]:
    return {**SETTINGS, "corpus": str(corpus)}


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def test_a_name_a_file_a_recipe_and_python_are_one_architecture(settings: dict[str, Any], tmp_path: Path) -> None:
    """To the bit: the weights after training have one SHA-256."""
    file, recipe = tmp_path / "file.toml", tmp_path / "recipe.toml"
    file.write_text('[model]\npreset = "yurii"\n')
    named = run_config("yurii", words(settings))
    recipe.write_text(as_toml(named.for_vocabulary(257)))  # bytes and the end of a text
    rows = {"name": "yurii", "file": file, "recipe": recipe, "python": sf.model_config("yurii", **SIZES)}
    table = sf.compare(rows, out=tmp_path / "study", seeds=2, **settings)
    assert [row.verdict for row in table.rows] == ["baseline", "identical", "identical", "identical"]
    assert {row.difference.mean for row in table.rows if row.difference} == {0.0}
    whole = RunConfig(named.model, named.data, named.optim, named.train)
    again = sf.compare({"a": named, "b": whole}, out=tmp_path / "whole", seeds=[42])
    assert again.rows[1].verdict == "identical"
    assert again.rows[0].records[0].weights_sha256 == table.rows[0].records[0].weights_sha256


def test_files_of_rows_are_named(settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong in one, what the command line replaces of it, and the size it has if it says none."""
    file = tmp_path / "wide.toml"
    file.write_text('[model]\npreset = "vanilla"\nd_modell = 32\n')
    command = ["compare", "vanilla", str(file), "--dry-run", "--out", str(tmp_path / "s")]
    assert main([*command, *words(settings)]) == 2
    assert f"In the row {file}: [model] Unknown key 'd_modell'" in capsys.readouterr().err
    file.write_text('[model]\npreset = "vanilla"\nd_model = 32\n')
    assert main([*command, *words(settings)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "wide.toml says d_model = 32: 16, given for all rows, replaces it." in said
    file.write_text('[model]\npreset = "vanilla"\nd_model = 32\nn_layer = 3\n')
    assert main([*command, *words({**settings, "size": "tiny"})]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("wide.toml says d_model") == 1
    assert main([*command, f"corpus={settings['corpus']}", "size=tiny", "d_model=64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "wide.toml says n_layer = 3: size=tiny, given for all rows, replaces it." in said
    assert said.count("wide.toml says d_model") == 1
    file.write_text('[model]\npreset = "hb"\n')
    assert main([*command, f"corpus={settings['corpus']}"]) == 2
    assert "A name alone is of size tiny, a file that says no size is small" in capsys.readouterr().err


BROKEN = """
import stepformer as sf


@sf.register_template("broken", equation="x' = x + c g(x)")
class Broken(sf.Template):
    coefficients = {"step": sf.positive(1.0)}

    def kick(self, s, c, g, scale=1.0):
        return s.replace(u=scale * c.stap * g)

    def drift(self, s, c, scale=1.0):
        return s.without("u").replace(x=s.x + s.u)
"""


def test_a_rule_that_cannot_take_a_step_is_told_before_the_baseline_is_trained(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN)
    command = ["compare", "vanilla", "broken", "--plugin", str(plugin), "--out", str(tmp_path / "s")]
    assert main([*command, *words(settings)]) == 2
    said = capsys.readouterr().err
    assert "In the row broken: AttributeError in broken.py, line 10: This turn has no coefficient 'stap'." in said
    assert not (tmp_path / "s").exists()
    # an error that only the backward pass finds, where no line of the rule is seen
    again = tmp_path / "inplace.py"
    again.write_text(BROKEN.replace("broken", "inplace").replace("c.stap * g", "c.step * g.exp().mul_(g)"))
    assert (
        main(["compare", "vanilla", "inplace", "--plugin", str(again), "--out", str(tmp_path / "s"), *words(settings)])
        == 2
    )
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stepformer:")]
    assert line.startswith("stepformer: In the row inplace: Something changes a tensor in place (mul_, +=)")


def test_that_a_rule_would_not_pass_its_audit_stays_below_the_table(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "peeks.py"
    plugin.write_text(
        BROKEN.replace("broken", "peeks").replace("c.stap * g", "c.step * g.mean(1, keepdim=True).expand_as(g)")
    )
    command = ["compare", "vanilla", "peeks", "--plugin", str(plugin), "--out", str(tmp_path / "s"), "--quiet"]
    assert main([*command, *words(settings)]) == 0
    said = (tmp_path / "s" / "comparison.md").read_text()
    assert "peeks: it would not pass its audit, since 2 causal: tokens from 1 on change the logits" in said
    assert main(["compare", "--runs", str(tmp_path / "s"), "--out", str(tmp_path / "o"), "--quiet"]) == 0
    assert "peeks: it would not pass its audit" in (tmp_path / "o" / "comparison.md").read_text()
    for more in (["eval"], ["generate", "--tokens", "2"]):
        for row, noted in (("peeks", True), ("vanilla", False)):
            capsys.readouterr()
            folder = str(next((tmp_path / "s").glob(f"{row}-s*/run.json")).parent)
            assert main([*more[:1], folder, *more[1:], "--plugin", str(plugin)]) == 0
            assert (f"note: {folder}: it would not pass its audit" in capsys.readouterr().err) == noted


# As much of something.


def two(**sizes: int) -> dict[str, RunConfig]:
    given = words({**SIZES, "d_model": 64, **sizes})
    return {name: run_config(name, given).for_vocabulary(1000) for name in ("vanilla", "yurii")}


def test_a_matched_baseline_has_as_many_parameters() -> None:
    for sizes in ({}, {"n_layer": 3}, {"d_model": 96, "n_head": 4}):
        variants = two(**sizes)
        (match,) = matched(variants, "vanilla", "parameters")
        wanted, found = (Model(c.model, device="meta").num_parameters() for c in (variants["yurii"], match.config))
        assert (match.wanted, match.found) == (wanted, pytest.approx(found))
        assert found / wanted == pytest.approx(1, abs=0.01)
        assert match.config.model.n_layer == variants["vanilla"].model.n_layer
        assert f"{wanted:,}" in str(match)


def test_a_matched_baseline_has_as_many_operations_or_as_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers with momentum against two without, and steps whose time is made up: 1 s for a width of 64."""
    variants = two(n_layer=2) | {"deep": run_config("yurii", words({**SIZES, "d_model": 64, "n_layer": 3}))}
    variants["deep"] = variants["deep"].for_vocabulary(1000)
    (match,) = matched(variants, "vanilla", "flops")  # momentum has no matrices of its own
    assert (match.candidate, match.config.model.n_layer) == ("deep", 2)
    assert match.wanted == flops_per_token(Model(variants["deep"].model, device="meta"))
    assert match.found == pytest.approx(flops_per_token(Model(match.config.model, device="meta")))
    assert match.found == pytest.approx(match.wanted, rel=0.01)
    assert f"{match.wanted:.3g} (" in str(match)
    seconds = {"yurii": 1.5, "deep": 2.5}

    def step(config: RunConfig, device: object) -> SimpleNamespace:
        row = next((name for name in seconds if config is variants[name]), "")
        return SimpleNamespace(step=seconds.get(row, config.model.d_model / 64))

    monkeypatch.setattr("stepformer.study.fairness.forecast", step)
    assert [match.config.model.d_model for match in matched(variants, "vanilla", "time")] == [96, 160]


def test_a_row_that_has_less_gets_a_narrower_baseline() -> None:
    variants = two()
    (match,) = matched(variants, "yurii", "parameters")
    assert match.config.model.d_model < 64
    assert match.found / match.wanted == pytest.approx(1, abs=0.01)


def test_rows_that_have_the_same_share_a_matched_baseline() -> None:
    variants = two() | {"hb": run_config("hb", words({**SIZES, "d_model": 64})).for_vocabulary(1000)}
    of_yurii, of_hb = matched(variants, "vanilla", "parameters")
    assert of_yurii.label == of_hb.label == "vanilla-parameters-of-hb"
    assert of_yurii.config == of_hb.config
    assert of_hb.wanted == Model(variants["hb"].model, device="meta").num_parameters()
    assert f"hb has {of_hb.wanted:,.0f}" in str(of_hb)


def test_a_shared_baseline_is_one_run_in_whatever_order_the_rows_are(tmp_path: Path) -> None:
    """Also where the nearest width is 4 % off."""
    given = {**SIZES, "d_model": 8}
    made = {name: run_config(name, words({**given, "n_layer": 5})).for_vocabulary(1000) for name in ("yurii", "hb")}
    base = run_config("vanilla", words({**given, "n_layer": 1})).for_vocabulary(1000)

    def added(*rows: str) -> tuple[dict[str, RunConfig], Facts]:
        variants = {"vanilla": base, **{name: made[name] for name in rows}}
        facts = with_matches(variants, "flops", tmp_path, Facts(baseline="vanilla"))
        return {label: config for label, config in variants.items() if label not in ("vanilla", *rows)}, facts

    one, facts = added("yurii", "hb")
    other, _ = added("hb", "yurii")
    assert list(one) == ["vanilla-flops-of-hb"]
    assert one == other
    assert facts.matches == dict.fromkeys(("yurii", "hb"), ("flops", "vanilla-flops-of-hb"))
    assert [remark.partition("; ")[2].split()[0] for remark in facts.remarks] == ["yurii", "hb"]
    (alone,) = added("yurii")[0]
    (tmp_path / f"{alone}-s42").mkdir()
    (tmp_path / f"{alone}-s42" / "run.json").touch()
    assert list(added("hb", "yurii")[0]) == [alone] == ["vanilla-flops-of-yurii"]  # which is trained already


def test_what_cannot_be_matched_is_refused() -> None:
    variants = two(d_model=4)  # two heads: widths are multiples of four, and the tables are most of it
    variants["yurii"] = run_config("yurii", words({**SIZES, "d_model": 6})).for_vocabulary(1000)
    with pytest.raises(InputError, match=r"no width of 'vanilla' has what 'yurii' has; the nearest is"):
        matched(variants, "vanilla", "parameters")
    with pytest.raises(InputError, match="write one of parameters, flops, time"):
        matched(variants, "vanilla", "luck")


@pytest.mark.usefixtures("few_charts")
@pytest.mark.slow
def test_the_verdict_names_the_match(settings: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {**settings, "d_model": 64}
    table = sf.compare("vanilla", "yurii", "ortho", out=tmp_path, seeds=2, match="parameters", **given)
    assert [row.label for row in table.rows] == ["vanilla", "yurii", "ortho", "vanilla-parameters-of-yurii"]
    assert "ortho and vanilla have equal parameters, within 2%." in table.notes
    yurii = table.rows[1]
    assert yurii.matched is not None
    assert yurii.verdict.endswith(f"at equal tokens; at equal parameters {yurii.matched[2].verdict}")
    by_hand = [a.val_loss - b.val_loss for a, b in zip(yurii.records, table.rows[3].records, strict=True)]
    assert yurii.matched[2].mean == pytest.approx(sum(by_hand) / 2)
    notes = "\n".join(table.notes)
    assert f"{table.rows[3].parameters:,} parameters; yurii has {yurii.parameters:,}" in notes
    assert "d_model" not in notes.replace("width", "")  # meant
    frame = table.to_frame()
    assert frame["matched_difference"][1] == pytest.approx(yurii.matched[2].mean, abs=1e-6)
    stored = json.loads((tmp_path / "study.json").read_text())
    assert Facts.of_study(stored).matches["yurii"] == ("parameters", "vanilla-parameters-of-yurii")
    folders = [str(record.folder) for row in table.rows for record in row.records]
    assert main(["compare", "--runs", *folders, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert "vanilla-parameters-of-yurii" in (tmp_path / "again" / "comparison.csv").read_text()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page"), "--no-samples"]) == 0
    assert "At equal parameters, yurii against" in (tmp_path / "page" / "index.html").read_text()
    records = [record for row in table.rows for record in row.records]
    other = {row.label: row for row in compare_records(records, "ortho", 0.95, Facts.of_study(stored)).rows}
    assert other["yurii"].matched is None  # it was matched with a wider vanilla, and is compared with ortho here
    fewer = sf.compare("vanilla", "ortho", out=tmp_path, seeds=2, **given)
    left_out = "not in this table since the command does not name it: vanilla-parameters-of-yurii, yurii."
    assert any(note.endswith(left_out) for note in fewer.notes)
    assert not any("seed 4" in note and "here too" in note for note in fewer.notes)
    fewer = sf.compare("vanilla", "ortho", out=tmp_path, seeds=[43], **given)
    left_out = "Trained here too, and not in this table since the command does not name it: seed 42."
    assert left_out in fewer.notes


def test_a_study_is_of_one_code_and_precision(settings: dict[str, Any], tmp_path: Path) -> None:
    def edit(name: str, change: Callable[[dict[str, Any]], None]) -> None:
        path = tmp_path / "vanilla-s42" / name
        found = json.loads(path.read_text())
        change(found)
        write_json(path, found)

    def ask(**more: Any) -> Comparison:
        return sf.compare("vanilla", "yurii", out=tmp_path, **more, **settings)

    ask()
    edit("environment.json", lambda found: found["versions"].update(sources="edited"))
    shutil.rmtree(tmp_path / "yurii-s42")
    with pytest.raises(InputError, match=r"differ in code\.stepformer .* permit it with --allow stepformer\."):
        ask()
    assert any("code.stepformer" in note for note in ask(allow=["stepformer"]).notes)
    with pytest.raises(InputError, match=r"would have runs that differ in code\.stepformer .*: choose another --out\."):
        ask(allow=["stepformer"], seeds=2)  # one row of two codes
    shutil.rmtree(tmp_path / "yurii-s42")
    edit("run.json", lambda found: found.update(precision="bf16"))
    with pytest.raises(InputError, match=r"runs that differ in train\.precision \(vanilla bf16, yurii fp32\)"):
        ask(allow=["stepformer"])


# The same search for all.


def test_every_row_is_tuned_alike(settings: dict[str, Any], tmp_path: Path) -> None:
    given = {**settings, "eval_tokens": 64}
    tune = {"tune": "lr,lr_norm=0.5x,2x", "budget_tune": 4 * 4 * 16}
    table = sf.compare("vanilla", "yurii", out=tmp_path, seeds=2, **tune, **given)
    for name in ("vanilla", "yurii"):
        points = {}
        for point in ("lr=0.5x_lr_norm=0.5x", "lr=0.5x_lr_norm=2x", "lr=2x_lr_norm=0.5x", "lr=2x_lr_norm=2x"):
            (record,) = load_records([tmp_path / "tuning" / f"{name}-{point}-s1000"])
            assert record.steps == 4
            assert record.settings["train.eval_half"] == "first"
            points[record.val_loss] = {key: record.settings[f"optim.{key}"] for key in ("lr", "lr_norm")}
        row = next(row for row in table.rows if row.label == name)
        for record in row.records:
            assert {key: record.settings[f"optim.{key}"] for key in ("lr", "lr_norm")} == points[min(points)]
            assert record.settings["train.eval_half"] == "second"
            assert record.val_hash != load_records([tmp_path / "tuning" / f"{name}-{point}-s1000"])[0].val_hash
        assert any(note.startswith(f"{name}: tuned to lr ") and "best of 4 points" in note for note in table.notes)
    assert any("at the edge of the grid" in note for note in table.notes)  # of two values one is always
    assert not any("The search trained on" in note for note in table.notes)  # half of a run is not short
    split = table.rows[0].records[0].settings["data.corpus"].split()[1]
    assert re.search(rf"64 tokens of the second half \([0-9a-f]{{12}}\) of split {split[:12]}", str(table))
    assert any(
        note.startswith("Search: lr = 0.5x, 2x; lr_norm = 0.5x, 2x (") and "every point, 256 training tokens" in note
        for note in table.notes
    )
    again = sf.compare("vanilla", "yurii", out=tmp_path, seeds=2, **tune, **given)
    assert str(again) == str(table)
    stored = json.loads((tmp_path / "study.json").read_text())
    facts = Facts.of_study(stored)
    assert facts.search.startswith("Search: lr = 0.5x, 2x; ")
    assert facts.search not in facts.remarks
    older = {key: value for key, value in stored["facts"].items() if key != "search"}
    older["remarks"] = [*older["remarks"], facts.search]
    assert Facts.of_study({"facts": older}) == facts


@pytest.mark.slow
def test_by_turns_each_axis_is_tried_at_the_best_so_far(settings: dict[str, Any], tmp_path: Path) -> None:
    axes = {"lr": (0.5, 1.0, 2.0), "lr_norm": (0.3, 1.0, 3.0), "wd_embedding": (0.0, 0.3)}
    tune = ["lr=0.5x,1x,2x", "lr_norm=0.3x,1x,3x", "wd_embedding=0,0.3"]
    how: dict[str, Any] = {"tune": tune, "budget_tune": 4 * 4 * 16, **settings}
    table = sf.compare("vanilla", "yurii", out=tmp_path / "study", by_turns=2, **how)
    notes = " ".join(table.notes)
    for name in ("vanilla", "yurii"):
        found = load_records(sorted((tmp_path / "study" / "tuning").glob(f"{name}-*-s1000")))
        losses = {tuple(round(r.settings[f"optim.{key}"], 9) for key in axes): r.val_loss for r in found}
        assert len(losses) == len(found)  # nothing twice
        assert {record.settings["train.eval_half"] for record in found} == {"first"}
        own = run_config(name, words(settings)).optim
        best, seen = (own.lr, own.lr_norm, own.wd_embedding), dict[tuple[float, ...], float]()
        for place, (key, values) in [*enumerate(axes.items())] * 2:
            for value in values:
                scale = 1.0 if key == "wd_embedding" else getattr(own, key)
                point = tuple(round(value * scale if i == place else old, 9) for i, old in enumerate(best))
                seen[point] = losses[point]
            best = min(seen, key=lambda point: seen[point])
        assert seen == losses
        (row,) = [row for row in table.rows if row.label == name]
        assert tuple(round(row.records[0].settings[f"optim.{key}"], 9) for key in axes) == best
        assert row.records[0].settings["train.eval_half"] == "second"
        assert f"best of {len(losses)} points, by turns in 2 rounds" in notes
        assert not [*(tmp_path / "study" / "tuning").glob(f"{name}-*/checkpoints/*")]  # they would fill a disk
    variants = {name: run_config(name, words(settings)) for name in ("vanilla", "yurii")}
    searched = search_of(tune, how["budget_tune"])
    first = with_tuning(
        variants, searched, how["budget_tune"], tmp_path / "study", Facts(), rounds=1, quiet=True
    )  # trains nothing: a second round goes on where the first ended
    assert " ".join(first.remarks).count("best of 7 points, by turns in 1 round)") == 2  # 3, then 2, then 2 new ones
    again = sf.compare("vanilla", "yurii", out=tmp_path / "study", by_turns=2, **how)
    assert str(again) == str(table)


def test_a_search_by_turns_that_was_stopped_goes_on(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ["--tune", "lr=0.5x,1x", "--tune", "lr_norm=0.5x,1x", "--budget-tune", "256", "--by-turns"]
    command = ["compare", "vanilla", "yurii", "--out", str(tmp_path), "--quiet", *words(settings), *tune]
    taken = [0]
    original = Trainer._train_step

    def step(self: Trainer) -> None:
        original(self)
        taken[0] += 1

    monkeypatch.setattr(Trainer, "_train_step", step)
    with monkeypatch.context() as patch:  # in the middle of the first run of the second turn
        patch.setattr(Watch, "asked", lambda self: int(signal.SIGALRM) if taken[0] == 18 else 0)
        assert main(command) == 128 + signal.SIGALRM
    said = "out of time after step 2; 4 of 6 runs of the search, turn 2 of 2, are finished, the rest is saved."
    assert f"{said} The same command continues." in capsys.readouterr().err
    assert main(command) == 0
    assert taken[0] == 6 * 4 + 2 * 6  # nothing was repeated


def test_a_longer_grid_finds_what_was_searched(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = {name: run_config(name, words(settings)) for name in ("vanilla", "yurii")}
    trained: list[str] = []

    def after(run: Planned) -> None:
        trained.append(run.name)

    monkeypatch.setattr("stepformer.study.fairness._without_weights", after)
    short, long = (search_of([f"lr={values}"], 256) for values in ("1x,2x", "0.5x,1x,2x"))
    assert len(search_left(variants, short, 256, tmp_path, 0)) == 4
    with_tuning({**variants}, short, 256, tmp_path, Facts(), quiet=True)
    assert trained == ["vanilla-1x-s1000", "vanilla-lr=2x-s1000", "yurii-1x-s1000", "yurii-lr=2x-s1000"]
    assert search_left(variants, short, 256, tmp_path, 0) == []
    assert len(search_left(variants, long, 256, tmp_path, 0)) == 2
    with_tuning({**variants}, long, 256, tmp_path, Facts(), quiet=True)
    assert trained[4:] == ["vanilla-lr=0.5x-s1000", "yurii-lr=0.5x-s1000"]


def test_a_dry_run_counts_the_search_and_refuses_what_the_run_would(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[int] = []

    def count(runs: list[Any]) -> list[str]:
        counted.append(len(runs))
        return []

    monkeypatch.setattr("stepformer.cli.compare._time_for", count)
    dry = ["compare", "vanilla", "yurii", "--out", str(tmp_path / "s"), "--quiet", "--dry-run", "--seeds", "2"]
    dry += words(settings)
    assert main([*dry, "--tune", "lr=0.5x,1x,2x", "--budget-tune", "256"]) == 0
    assert main(dry) == 0
    assert counted == [2 * 3 + 4, 4]
    own = tmp_path / "own.toml"
    own.write_text('[model]\npreset = "yurii"\n[optim]\nlr = 0.03\n')
    assert main([*dry, str(own), "--tune", "lr=0.5x,1x", "--budget-tune", "256"]) == 0  # of each row's own rate
    assert not (tmp_path / "s").exists()
    sf.compare("vanilla", "yurii", out=tmp_path / "s", seeds=2, **settings)
    before = (tmp_path / "s" / "study.json").read_bytes()
    assert main([*dry, "lr=0.5"]) == 2
    assert "was trained with other settings, optim.lr" in capsys.readouterr().err
    assert main([*dry, "n_layer=2"]) == 2
    assert main([*dry, "lr=0.5", "--tune", "lr=0.5x,1x", "--budget-tune", "256"]) == 0  # the search may find it
    capsys.readouterr()
    assert main([*dry, "steps=7", "--tune", "lr=0.5x,1x", "--budget-tune", "256"]) == 2
    assert "was trained with other settings, train.steps" in capsys.readouterr().err
    assert (tmp_path / "s" / "study.json").read_bytes() == before
    monkeypatch.undo()
    search = ["compare", "vanilla", "yurii", "--out", str(tmp_path / "t"), *words(settings), "--budget-tune", "256"]
    assert main([*search, "--quiet", "--tune", "lr=0.5x,1x"]) == 0
    capsys.readouterr()
    assert main([*search, "--dry-run", "--tune", "lr=0.5x,1x"]) == 0  # the search is over
    said = " ".join(capsys.readouterr().out.split())
    assert "best of 2 points" in said
    assert "before the search" not in said


def test_a_budget_that_is_no_whole_number_of_steps_is_told(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del settings["steps"]
    asked = ["compare", "vanilla", "yurii", *words(settings), "--out", str(tmp_path / "s"), "--dry-run"]
    assert main([*asked, "--budget", "300"]) == 0
    said = "--budget 300 is rounded to 5 steps of 64 tokens, 320 in all"
    assert capsys.readouterr().err.count(said) == 1
    assert main([*asked, "--budget", "320"]) == 0
    assert main([*asked, "--budget", "300", "--quiet"]) == 0
    assert "rounded" not in capsys.readouterr().err


def test_what_cannot_be_tuned_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    def refused(error: type[StepformerError], match: str, **more: Any) -> None:
        with pytest.raises(error, match=match):
            sf.compare("vanilla", "yurii", out=tmp_path / "no", **more, **settings)
        assert not (tmp_path / "no").exists()

    refused(InputError, "needs --budget-tune", tune="lr=1,2")
    refused(InputError, "say what to tune", budget_tune="1k")
    refused(InputError, "with two values or more", tune="lr=1", budget_tune="1k")
    refused(InputError, "only keys of", tune="n_layer=1,2", budget_tune="1k")
    refused(ConfigError, "probe = 64 belongs to name = 'trust'", tune="probe=64,128", budget_tune="1k")
    refused(InputError, "those of the search", tune="lr=0.1,0.2", budget_tune="1k", seeds=[1000])
    refused(InputError, "less than half a step", tune="lr=0.1,0.2", budget_tune=3)
    refused(InputError, "no multiple", tune="polar=2x,3x", budget_tune="1k")
    refused(InputError, "no multiple", tune=["lr=1x,2x", "polar=2x,3x"], budget_tune="1k", by_turns=1)
    refused(InputError, "give those, and 1 or more", by_turns=1)
    refused(InputError, "give those, and 1 or more", tune="lr=0.1,0.2", budget_tune="1k", by_turns=-1)
    assert main(["compare", "vanilla", "yurii", "--tune", "lr=1,2", "--budget-tune", "1k", "--slurm", "a=1"]) == 2


def test_a_point_that_diverges_is_out_and_one_that_fails_stops(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = {"vanilla": run_config("vanilla", words({**settings, "max_loss": 7}))}
    facts = with_tuning(
        variants, search_of(["lr_embedding=0.001,100"], "1k"), "1k", tmp_path / "a", Facts(), quiet=True
    )
    assert "best of 2 points, 1 of which diverged" in facts.remarks[0]
    assert variants["vanilla"].optim.lr_embedding == 0.001

    def full(*args: Any, **kwargs: Any) -> None:
        raise InputError("No space left on device.")

    monkeypatch.setattr("stepformer.study.study.train", full)
    with pytest.raises(StepformerError, match=r"of the search failed: No space left on device\."):
        with_tuning(variants, search_of(["lr=0.001,0.002"], "1k"), "1k", tmp_path / "b", Facts(), quiet=True)


@pytest.mark.usefixtures("few_charts")
def test_a_row_with_a_budget_of_its_own(settings: dict[str, Any], tmp_path: Path) -> None:
    common = {key: value for key, value in settings.items() if key != "steps"}
    rows = {f"yurii-{steps}": run_config("yurii", words({**common, "steps": steps})) for steps in (8, 6)}
    with pytest.raises(ConfigError, match=r"differ in train\.steps .* --allow steps"):
        sf.compare(rows, out=tmp_path / "no")
    table = sf.compare(rows, out=tmp_path / "own", seeds=2, allow=["steps"])
    assert table.rows[1].verdict.endswith(", other budget")
    assert "The rows also differ in train.steps (yurii-8 8, yurii-6 6)." in table.notes
    folders = [str(path.parent) for path in sorted((tmp_path / "own").glob("*/run.json"))]
    elsewhere = ["compare", "--baseline", "yurii-8", "--out", str(tmp_path / "c"), "--runs"]
    assert main([*elsewhere, *folders]) == 0  # the study has permitted it, and study.json says so
    assert ", other budget" in (tmp_path / "c" / "comparison.md").read_text()
    assert main(["report", str(tmp_path / "own"), "--out", str(tmp_path / "page"), "--no-samples"]) == 0
    assert "has a budget of its own" in (tmp_path / "page" / "index.html").read_text()


# Sweeps.


def test_a_sweep_whose_first_point_diverges(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are compared with the next one, and it says so."""
    command = ["sweep", "vanilla", "--grid", "lr_embedding=100,0.001,0.002", "--out", str(tmp_path / "s"), "--quiet"]
    assert main([*command, *words({**settings, "max_loss": 7})]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "No run of the baseline lr_embedding=100 finished: differences are to lr_embedding=0.001." in said
    assert "Best of 2 points" in said


def test_a_sweep_names_its_best_point(settings: dict[str, Any], tmp_path: Path) -> None:
    table = sf.sweep("vanilla", {"lr": (1e-6, 0.02, 1e-5)}, out=tmp_path, seeds=2, **settings)
    best, *rest = table.notes
    assert best.startswith("Best of 3 points: lr=0.02, ")
    losses = {row.label: [record.val_loss for record in row.records] for row in table.rows}
    second = min((label for label in losses if label != "lr=0.02"), key=lambda label: sum(losses[label]))
    mean = sum(a - b for a, b in zip(losses["lr=0.02"], losses[second], strict=True)) / 2
    assert f"to the next best, {second}, {mean:+.4f} [" in best
    assert any("edge of the grid in lr" in note for note in rest)
    figure = draw_comparison(table)
    swept = figure.axes[2]  # a line of means over the values in order, and under it the seeds
    assert (swept.get_xlabel(), swept.get_xscale()) == ("lr", "log")
    drawn = max(swept.lines, key=lambda line: len(line.get_xdata()))
    assert [*drawn.get_xdata()] == [1e-6, 1e-5, 0.02]
    assert [*drawn.get_ydata()] == [sum(losses[f"lr={value}"]) / 2 for value in ("1e-06", "1e-05", "0.02")]
    assert len(swept.lines) == 1 + 3
    axes = {"lr": ("1", "0.02", "1e-3"), "optim.name": ("muon", "adamw"), "train.batch": ("4", "8"), "beta1": ("0.9",)}
    points = grid_points(axes)
    assert at_the_edge(axes, points["lr=0.02_name=muon_batch=8_beta1=0.9"]) == ["train.batch"]
    assert at_the_edge(axes, points["lr=1e-3_name=adamw_batch=4_beta1=0.9"]) == ["lr", "train.batch"]


def test_losses_on_different_tokens_have_no_best_point(settings: dict[str, Any], tmp_path: Path) -> None:
    given = {key: value for key, value in settings.items() if key != "eval_tokens"}
    table = sf.sweep("vanilla", {"eval_tokens": (128, 256)}, out=tmp_path, **given)
    assert not any("Best of" in note for note in table.notes)
    words_have_no_order = dataclasses.replace(table, axes={"norm": ("layernorm", "rmsnorm")})
    assert len(draw_comparison(words_have_no_order).axes) == len(draw_comparison(table).axes) - 1


def test_unset_rates_are_those_of_the_first_point(settings: dict[str, Any], tmp_path: Path) -> None:
    table = sf.sweep("vanilla", {"d_model": (16, 64)}, out=tmp_path, **settings)
    assert len({row.records[0].settings["optim.lr_norm"] for row in table.rows}) == 1


def test_a_config_in_a_run_folder_beside_a_name(settings: dict[str, Any], tmp_path: Path) -> None:
    """Its vocabulary is written down, a name's is the corpus's: that is no difference."""
    sf.train(run_config("yurii", words(settings)), tmp_path / "run", quiet=True)
    rows = {"vanilla": "vanilla", "mine": tmp_path / "run" / "config.toml"}
    table = sf.compare(rows, out=tmp_path / "study", **settings)
    assert not [note for note in table.notes if "differ" in note]
    others = [run_config("vanilla", words(settings)), run_config("yurii", words({**settings, "batch": 8}))]
    with pytest.raises(ConfigError, match=r"The rows differ in train\.batch"):
        sf.compare(*others, out=tmp_path / "no")
