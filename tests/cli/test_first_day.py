"""What somebody meets on the first day: each message names what helps, and what it prints can be typed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
import stepformer as sf
from runs import make_corpus, small_run
from stepformer.base.errors import InputError, suggestion
from stepformer.cli import main
from stepformer.cli.prepare import print_corpus
from stepformer.cli.show import console
from stepformer.data import open_source
from stepformer.measure.diagnostics.audit import GEOMETRY
from stepformer.study.grids import grid_points
from stepformer.training import checkpoints, metrics, train
from stepformer.training.config import DataConfig
from stepformer.training.corpora import open_corpus
from stepformer.training.parallel import World

ROOT = Path(__file__).resolve().parents[2]
QHM = re.findall(r"```python\n(.*?)```", (ROOT / "docs/write-your-own-rule.md").read_text(), re.DOTALL)[0]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that is refused says."""
    try:
        status: Any = main([*words])
    except SystemExit as stop:  # argparse's own
        status = stop.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("first")
    train(small_run(make_corpus(base / "corpus").folder, steps=2, eval_every=1), base / "run", quiet=True)
    return base / "run"


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("train yurii --steps 10", "steps=10"),
        ("train --steps 10 yurii", "steps=10"),
        ("train yurii --steps=10", "steps=10"),
        ("train yurii --n-layer 3 --quiet", "n_layer=3"),
        ("compare vanilla yurii --lr 0.1", "lr=0.1"),
        ("show yurii --splitting strang", "splitting=strang"),
        ("show yurii --radius 2", "radius=2"),
        ("diagnose runs/x --depth --windows 3", "windows=3"),
    ],
)
def test_a_setting_written_as_an_option(words: str, setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words.split()).endswith(f"Settings are written key=value, without dashes: {setting}.")


def test_an_option_that_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "train", "yurii", "--dri-run").endswith("Did you mean '--dry-run'?")
    assert "key=value" not in said(capsys, "eval", "run", "--steps", "3")  # it takes none
    assert said(capsys, "compare", "vanilla", "yurii", "--seed", "2").endswith("--seed. Did you mean --seeds?")


@pytest.mark.parametrize(
    ("words", "option"),
    [("eval run --strid 3", "--stride"), ("show yurii --batc 2", "--batch"), ("generate run One --tok=3", "--tokens")],
)
def test_half_an_option_is_none(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words.split()).endswith(f"Did you mean '{option}'?")


def test_default_sizes_are_those_of_the_training_page(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[model]\npreset = "yurii"\n')
    page = (ROOT / "docs/train.md").read_text()
    assert "`tiny` size: `stepformer train`, `stepformer compare` and `sf.run_config`" in page
    assert sf.run_config("yurii").model.n_layer == sf.model_config("yurii", size="tiny").n_layer
    assert "takes `small`: `stepformer show`, `sf.build`, `sf.model_config`; and so does a TOML file" in page
    small = sf.model_config("yurii", size="small")
    assert small == sf.model_config("yurii") == sf.load_config(tmp_path / "my.toml")
    assert sf.run_config(tmp_path / "my.toml").model.n_layer == small.n_layer


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "stepformer demo  " in capsys.readouterr().err


def test_a_file_that_is_not_there_suggests_no_name(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("tale.txt", "wikitex.md", "data/tales"):
        assert "Did you mean" not in said(capsys, "eval", str(trained), "--on", word)
        assert "Did you mean" not in said(capsys, "prepare", word)
    assert "Did you mean 'tales'" in said(capsys, "prepare", "tale")
    assert said(capsys, "train", "yuri.toml") == "stepformer: There is no config file 'yuri.toml'."
    assert suggestion("mine.tom", ["mine.toml", "mine"]) == " Did you mean 'mine.toml'?"


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("show yurii mlp=relu3", "rule"),
        ("train yurii mlp=foo", "rule"),
        ("audit yurii attention=foo", "attention"),
        ("show yurii template=foo", "rule"),
        ("show qhn", "rule"),
        ("train qhn", "rule"),
        ('show yurii extras=["foo"]', "extra"),
    ],
)
def test_an_unknown_part_names_the_page_on_your_own(words: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = f"docs/write-your-own-{page}.md"
    assert (ROOT / page).is_file()
    assert f"One of your own: name its file with --plugin, or import it ({page})." in said(capsys, *words.split())


def test_a_short_text_is_offered_a_small_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFORMER_HOME", raising=False)
    Path("my notes.txt").write_text((ROOT / "README.md").read_text())
    alone = World(0, 1, checkpoints.torch.device("cpu"))
    with pytest.raises(InputError) as found:
        open_corpus(DataConfig(corpus="my notes.txt"), alone)
    assert "run `stepformer prepare 'my notes.txt' --tokenizer bpe:1024` first" in str(found.value)
    then = str(found.value).rpartition("then say ")[2].rstrip(".").removeprefix("corpus=")
    assert main(["prepare", "my notes.txt", "--tokenizer", "bpe:300"]) == 0
    assert "are few for" not in capsys.readouterr().out
    with pytest.raises(InputError, match=r"but it is with bpe:300: say corpus=data/my-notes-bpe-300\."):
        open_corpus(DataConfig(corpus="my notes.txt"), alone)
    assert main(["prepare", "my notes.txt", "--tokenizer", "bpe:1024"]) == 0
    assert open_corpus(DataConfig(corpus=then), alone).name == "my notes"
    with pytest.raises(InputError, match=r"run `stepformer prepare 'my notes\.txt' --tokenizer gpt2` first"):
        open_corpus(DataConfig(corpus="my notes.txt", tokenizer="gpt2"), alone)
    Path("my notes.txt").write_text("Something else. " * 99)  # what was prepared is of the old text
    with pytest.raises(InputError, match=r"before its files changed it was, with bpe:1024, bpe:300: run `") as found:
        open_corpus(DataConfig(corpus="my notes.txt"), alone)
    assert main(shlex.split(str(found.value).split("`")[1])[1:]) == 0  # what it says to run makes it that of today
    with pytest.raises(InputError, match=r"but it is with bpe:1024: say corpus=data/my-notes-bpe-1024\."):
        open_corpus(DataConfig(corpus="my notes.txt"), alone)
    small = ["n_layer=1", "n_head=1", "d_model=8", "context=16", "batch=1"]
    assert main(["train", "vanilla", "corpus=my notes.txt", *small, "--dry-run"]) == 0
    assert " without evaluations (" in " ".join(capsys.readouterr().out.split())


def test_prepare_says_that_a_vocabulary_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    print_corpus(console(), corpus)
    assert "are few for" not in capsys.readouterr().out
    corpus.manifest["tokenizer"]["vocab_size"] = 50257
    print_corpus(console(), corpus)
    assert "training tokens are few for 50,257 ids: --tokenizer bpe:1024 or bytes" in capsys.readouterr().out


TYPOS = {
    "betta": (QHM.replace("c.beta *", "c.betta *"), r"AttributeError in qhm\.py, line 18: .* Did you mean 'beta'\?"),
    "number": (QHM.replace("sf.positive()", "0.5"), r"The coefficient 'gamma' is 0\.5: declare it as sf\.unit"),
    "name": (QHM.replace("scale * g)", "scael * g)"), r"NameError in qhm\.py, line 18: name 'scael' is not defined"),
    "return": (QHM.replace("return s.without", "s.without"), r"QuasiHyperbolic\.drift\(\) returns None: is its return"),
    "shape": (
        QHM.replace("c.gamma * g, u", "(c.gamma * g).mean(-1), u").replace("c.beta * s.v", "c.beta * s.v.mean(-1)"),
        r"QuasiHyperbolic\.kick\(\) leaves the stream 'v' in the shape \(\d+, 16\); the norm needs that of x",
    ),
    "norm": (QHM.replace('normalises = "v"', 'normalises = "w"'), r"QuasiHyperbolic normalises 'w', which is none of"),
    "syntax": (QHM.replace("scale=1.0):", "scale=1.0)"), r"qhm\.py' is not Python: expected ':', line 17\."),
    "load": (QHM.replace("as sf", "as s"), r"'qhm\.py' failed to load: NameError in qhm\.py, line 4: name 'sf'"),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_fault_of_a_plugin_is_a_sentence_in_train_as_in_audit(typo: str, trained: Path, tmp_path: Path) -> None:
    rule, sentence = TYPOS[typo]
    assert rule != QHM
    (tmp_path / "qhm.py").write_text(rule)
    small = ("n_layer=1", "n_head=2", "d_model=16", "context=16", "steps=1", "batch=2", "eval_tokens=64")
    words = ("train", "qhm", "--plugin", "qhm.py", *small, f"corpus={trained.parent / 'corpus'}", "--out", "run")
    audited = forked.stepformer("audit", "qhm", "--plugin", "qhm.py", "--steps", "30", cwd=tmp_path)
    assert re.search(sentence, audited.stdout + audited.stderr)
    refused = forked.stepformer(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert re.search(sentence, refused.stderr)
    assert "Traceback" not in refused.stderr
    if typo != "betta":  # one is enough for what follows
        return
    (tmp_path / "qhm.py").write_text(QHM)
    done = forked.stepformer(*words, cwd=tmp_path)  # in the same folder: there was no run yet
    assert done.returncode == 0
    assert "qhm s42  step" in done.stderr  # by its own name


PLUGINS = {
    "preset": (
        "yurii",
        QHM.replace('"qhm"', '"yurii"'),
        "The template name 'yurii' is already taken: it is an alias of the preset 'nesterov-lie-trotter'.",
    ),
    "other": ("qhn", QHM, "Of your own there are the templates qhm."),
    "none": ("qhm", "import stepformer", "The plug-ins that were loaded register no template."),
}


@pytest.mark.parametrize("case", PLUGINS)
def test_a_name_that_is_not_what_the_plugin_registers(case: str, tmp_path: Path) -> None:
    name, rule, sentence = PLUGINS[case]
    (tmp_path / "mine.py").write_text(rule)
    refused = forked.stepformer("show", name, "--plugin", "mine.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert sentence in refused.stderr


def test_an_extra_is_named_in_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "show", "yurii", "extras=echo").endswith(
        "should be a list of names; in a shell: 'extras=[\"name\"]'."
    )


def test_an_attention_and_an_extra_that_return_nothing(tmp_path: Path) -> None:
    pages = {"attention": "sigmoid", "extra": "echo"}
    for page, name in pages.items():
        text = (ROOT / f"docs/write-your-own-{page}.md").read_text()
        block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
        (tmp_path / f"{name}.py").write_text(re.sub(r"return (self\.out|s\.replace)", r"\1", block))
    for setting, name, sentence in (
        ("attention=sigmoid", "sigmoid", "SigmoidAttention.forward() returns None"),
        ('extras=["echo"]', "echo", "Echo.enter() returns None"),
    ):
        done = forked.stepformer("audit", "yurii", setting, "--plugin", f"{name}.py", "--steps", "30", cwd=tmp_path)
        assert done.returncode == 1
        assert sentence in done.stdout


def test_show_tells_of_a_rule_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "qhm.py").write_text(QHM.replace("s.x + c.nu", "s.x.mean(1) + c.nu"))
    refused = forked.stepformer("show", "qhm", "--plugin", "qhm.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("stepformer: RuntimeError in qhm.py, line ")


def test_a_rule_without_finite_values(trained: Path, tmp_path: Path) -> None:
    """The audit says so, and training does not advise another rate before it has taken a step."""
    (tmp_path / "qhm.py").write_text("import torch\n" + QHM.replace("s.x + c.nu", "torch.sqrt(s.x) + c.nu"))
    audited = forked.stepformer("audit", "qhm", "--plugin", "qhm.py", "--steps", "30", cwd=tmp_path)
    assert "2 causal: the logits are not finite" in audited.stdout
    small = ("n_layer=1", "n_head=2", "d_model=16", "context=16", "steps=1", "batch=2", "eval_tokens=64")
    words = ("train", "qhm", "--plugin", "qhm.py", *small, f"corpus={trained.parent / 'corpus'}", "--out", "run")
    assert "no step was taken yet, so the reason is the architecture" in forked.stepformer(*words, cwd=tmp_path).stderr


def test_the_cost_of_a_size_is_said_before_training(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepformer.training import speed

    corpus = trained.parent / "corpus"
    words = ["train", "yurii", f"corpus={corpus}", "steps=1", "batch=1", "eval_tokens=128", "device=cpu", "--out"]
    monkeypatch.setattr(speed, "peak_flops", lambda device: (1e9, "a slow machine"))
    assert main([*words, str(trained.parent / "unset")]) == 0
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.startswith("yurii s42  size tiny, 4 layers of width 128: 903,320 parameters; 1 steps of 128 tokens (")
    assert re.search(r"\([\d.]+ epochs\), about [\d.]+ \w+ if it reaches 30 % of this device's peak$", first)
    assert second == f"yurii s42  in {trained.parent / 'unset'}"
    monkeypatch.setattr(speed, "peak_flops", lambda device: (1e15, "a fast machine"))  # which waits for other things
    assert main([*words, str(trained.parent / "fast")]) == 0
    assert capsys.readouterr().err.splitlines()[0].endswith(" epochs)")
    assert main([*words, str(trained.parent / "quiet"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_the_time_left_is_that_of_steps_after_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    display = metrics.Display("a")
    display.begin(10, 0)
    for step, took in enumerate([100, 60, 3, *[3] * 7], 1):  # compiling, then a pace
        now += took
        display.step(step, 1.0, 1.0, 1.0, 0.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["MFU 0 %"] * 5 + [
        f"{3 * n:.1f} s left" for n in (4, 3, 2, 1)
    ] + ["MFU 0 %"]


@pytest.mark.parametrize("at", ["run.Trainer", "runs.load_tokenizer", "runs.environment"])
def test_a_training_interrupted_before_it_is_a_run_leaves_no_folder(
    at: str, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = trained.parent / "interrupted"
    words = ["train", "yurii", f"corpus={trained.parent / 'corpus'}", "steps=1", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(f"stepformer.training.{at}", interrupted)
        assert main(words) == 130
    assert not out.exists()


def test_the_time_of_a_dry_run_knows_how_long_the_validation_split_is(trained: Path) -> None:
    from stepformer.training.speed import forecast

    config = small_run(trained.parent / "corpus", eval_tokens=4_915_200)
    device = checkpoints.torch.device("cpu")
    short, long = (forecast(config, device, eval_tokens=n, longest=0).run for n in (512, None))
    assert short < long / 100


def test_runs_that_differ_in_their_rates_are_measured_once(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepformer.training import speed

    measured = list[str]()
    monkeypatch.setattr(speed, "_MEASURED", {})
    monkeypatch.setattr(speed, "_measured", lambda config, *_: (measured.append(config.optim.polar), (0.5, 0.25))[1])
    device, corpus = checkpoints.torch.device("cpu"), trained.parent / "corpus"
    plain, faster, exact = (small_run(corpus, **more) for more in ({}, {"lr": 0.3}, {"polar": "svd"}))
    seconds = [speed.forecast(config, device, eval_tokens=512).step for config in (plain, faster, exact)]
    assert seconds == [0.75] * 3
    assert measured == ["newton-schulz", "svd"]


def test_sharpness_aware_steps_are_measured_as_they_are(trained: Path) -> None:
    from stepformer.training import speed

    config = small_run(trained.parent / "corpus", sam="always")
    assert speed.forecast(config, checkpoints.torch.device("cpu"), eval_tokens=512).run > 0


def test_the_audit_names_what_it_ignores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "gd", "--steps", "30", "n_layer=7", "size=medium", "lr=3", "norm=rmsnorm"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("note: ignored: n_layer=7, size=medium, lr=3. The audited copy has 2 layers")
    assert all(str(value) in err for value in GEOMETRY.values())
    assert "norm=rmsnorm" in out
    (tmp_path / "my.toml").write_text('[model]\npreset = "gd"\nd_model = 64\nn_head = 8\n[train]\nsteps = 5\n')
    assert main(["audit", str(tmp_path / "my.toml"), "--steps", "30"]) == 0
    named = ", ".join(f"{what} of {tmp_path / 'my.toml'}" for what in ("d_model", "n_head", "[train]"))
    assert f"note: ignored: {named}." in capsys.readouterr().err
    assert main(["audit", "gd", "--steps", "30"]) == 0
    assert "ignored" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["notes.md", "NOTES", "chapter.one.tex", "notes.md.gz"])
def test_texts_of_any_suffix_are_evaluated(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gzip

    text = ("The fox went home. " * 40).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert main(["eval", str(trained), "--on", str(tmp_path / name), "--device", "cpu", "--quiet"]) == 0
    assert "bits" in capsys.readouterr().out
    (tmp_path / "picture.pdf").write_bytes(b"%PDF-1.7 \xe2\xe3\xcf\xd3")
    assert "is not UTF-8 text" in said(capsys, "eval", str(trained), "--on", str(tmp_path / "picture.pdf"))


def test_prepare_says_what_it_passes_over_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.rst", "c.log", "d.rst", ".hidden"):
        (texts / name).write_text(f"{name} is a text. " * 50)
    assert [found.text[:5] for found in open_source(str(texts))] == ["a.txt"]
    assert main(["prepare", str(texts), "--tokenizer", "bytes", "--out", str(tmp_path / "corpus")]) == 0
    assert f"note: not read in '{texts}': 2 .rst, 1 .log; " in capsys.readouterr().out


@pytest.mark.parametrize("home", ["", "home"])
def test_a_corpus_whose_folder_was_left_out(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPFORMER_HOME", home)
    for name in ("my-texts", "c4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("Once upon a time. " * 50)
        assert main(["prepare", f"./{name}", "--tokenizer", "bytes"]) == 0
    data = Path(home, "data")
    (data / "c4-bytes").rename(data / "c4")
    (tmp_path / "c4").rename(tmp_path / "away")
    capsys.readouterr()
    for command in ("train yurii", "compare yurii vanilla"):
        ends = f"There is no corpus 'my-texts-bytes' here. Did you mean corpus={data}/my-texts-bytes?"
        assert said(capsys, *command.split(), "corpus=my-texts-bytes").endswith(ends)
    assert "The corpus 'c4' is not prepared" in said(capsys, "train", "yurii", "corpus=c4")  # the dataset is meant


def test_labels_of_a_sweep_have_no_minus_of_their_own() -> None:
    labels = list(grid_points({"optim.lr": ("0.01", "1e-3"), "beta1": ("-0.5",)}))
    assert labels == ["lr=0.01_beta1=-0.5", "lr=1e-3_beta1=-0.5"]


def test_layers_are_counted_from_0_on_the_page() -> None:
    source = (ROOT / "src/stepformer/pages/serving/page/tokens.js").read_text()
    assert "`layer ${layer}`" in source
    shown = [
        path for path in (ROOT / "src").rglob("*.[jp][sy]") if re.search(r"[Ll]ayer \$?\{\w+ \+ 1\}", path.read_text())
    ]
    assert not shown


def test_what_export_prints_can_be_run(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = forked.stepformer("export", str(trained), "--out", "it's my export", cwd=tmp_path)
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert len(lines) == 3
    loaded = forked.python("\n".join([*lines, "print(model.num_parameters(), tokenizer.vocab_size)"]), cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    assert len(loaded.stdout.split()) == 2


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("trian yurii", "there is no command 'trian'. Did you mean 'train'? `stepformer --help` lists them all."),
        ("help", "there is no command 'help'. `stepformer --help` lists them all."),
        ("train", "the following arguments are required: PRESET|RECIPE|FILE.toml"),
        ("train yurii steps = 10", "A setting has no blanks around '=': write steps=10."),
        ("train yurii data/my-texts", "is not of the form key=value. A corpus is named corpus=data/my-texts."),
        ("train yurii steps 10", "A setting is one word: write steps=10."),
        ("train yurii qk_norm true lr=0.1", "A setting is one word: write qk_norm=true."),
        ("compare vanilla yurii optim.lr 0.1 steps 10", "A setting is one word: write optim.lr=0.1 steps=10."),
        (
            "train relu2 steps=10",
            "'relu2' is no whole architecture: write `PRESET mlp=relu2`. No recipe has that name either.",
        ),
        ("show vanilla yurii --cite", "and 'yurii' is another: ask for each on its own."),
        ("compare vanilla yurii --latex", "unrecognized arguments: --latex."),
        ("train yurii vanilla steps=1", "`stepformer compare yurii vanilla` trains several side by side."),
        ("compare vanilla yurii --set batch=4", "Settings are written key=value, without dashes: batch=4."),
        ("prepare my-texts --tokenizer bpe1024", "Did you mean 'bpe:1024'?"),
        ("prepare my-text", "Did you mean 'my-texts'?"),
        ("prepare data/x.txt", "nor hf:OWNER/NAME. `stepformer prepare` makes such a folder of your text."),
        ("prepare tests-of-mine", "nor hf:OWNER/NAME."),
        ("train size=tiny", "the name of an architecture comes first, e.g. vanilla size=tiny."),
        ("list nestrov", "No preset matches 'nestrov'. Did you mean 'nesterov'? `stepformer list` shows all of them."),
        (
            "generate RUN One morning",
            "unrecognized arguments: morning. A prompt of several words is written in quotes.",
        ),
        ("train yurii corpus=data/my-texts", "Did you mean 'data/my-texts-bpe-1024'?"),
        ("prepare notes --tokenizer bytes", "It has 2 .rst: if that is text, join it, `cat notes/*.rst > notes.txt`."),
        (
            "prepare latin.txt --tokenizer bytes",
            "is converted by `iconv -f LATIN1 -t UTF-8 latin.txt > NEW.txt`, which then takes its place.",
        ),
        (
            "prepare wide.txt --tokenizer bytes",
            "is converted by `iconv -f UTF-16 -t UTF-8 wide.txt > NEW.txt`, which then takes its place.",
        ),
        ("prepare rows.jsonl --tokenizer bytes", "it has content. --field NAME says which one holds the text."),
        ("generate yurii One", "There is no run folder 'yurii'. Did you mean 'runs/yurii-s1'?"),
        ("generate runs One", "it has no run.json. Did you mean 'runs/yurii-s1'?"),
        ("generate yurii-s2 One", "There is no run folder 'yurii-s2'. Did you mean 'runs/yurii-s1'?"),
        ("compare runs/yurii-s1 vanilla", "and `stepformer compare --runs` compares runs."),
    ],
)
def test_typical_mistakes(
    words: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("my-texts", "notes", "data/my-texts-bpe-1024", "runs/yurii-s1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "my-texts/a.txt").write_text("Once upon a time.")
    (tmp_path / "notes/a.rst").write_text("A")
    (tmp_path / "notes/b.rst").write_text("B")
    (tmp_path / "data/y.txt").write_text("y")
    (tmp_path / "latin.txt").write_bytes("ein Fuß".encode("latin-1") + b" weit")
    (tmp_path / "wide.txt").write_bytes("ein Fuß".encode("utf-16"))
    (tmp_path / "rows.jsonl").write_text('{"content": "a"}\n')
    (tmp_path / "runs/yurii-s1/run.json").write_text("{}")
    assert said(capsys, *words.split()).endswith(ends)


@pytest.mark.parametrize(
    ("letters", "command"),
    [(40_000, "corpus=data/a-bytes"), (1400, "corpus=data/a-bytes context=64"), (5, "")],
)
def test_the_command_that_prepare_prints_fits_a_short_text(
    letters: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a story " * (letters // 8) or "short")
    assert main(["prepare", "a.txt", "--tokenizer", "bytes"]) == 0
    printed = capsys.readouterr().out
    assert "the end of each, 5 % of its characters, is validation" in printed
    assert printed.partition("train on it: ")[2].splitlines() == (
        [f"stepformer train glide {command}"] if command else []
    )
    if "context" in command:
        assert main(["train", "glide", *command.split(), "steps=1", "batch=1", "device=cpu", "--quiet"]) == 0


def test_resuming_a_finished_run_says_so(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(trained)]) == 0
    said = f"so nothing was trained; a new run begins with its weights by `train ... init={trained}`."
    assert f"note: this run was finished already, {said}" in capsys.readouterr().err


def test_a_name_does_not_stand_for_another_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared corpus is found by the name of its file, and taken if it was made from this file as it is now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFORMER_HOME", raising=False)
    Path("other").mkdir()
    Path("book.txt").write_text("One morning the keeper wrote a letter. " * 100)
    Path("other/book.txt").write_text("In the evening nobody answered it at all. " * 100)
    assert main(["prepare", "book.txt", "--tokenizer", "bytes"]) == 0
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "steps=1", "device=cpu", "tokenizer=bytes"]
    assert main(["train", "vanilla", "corpus=book.txt", *small, "--quiet", "--out", "runs/a"]) == 0
    other = "'data/book-bytes' was made from other files, or from these before they changed: run `stepformer prepare "
    assert other in said(capsys, "train", "vanilla", "corpus=other/book.txt", *small, "--out", "runs/b")
    assert not Path("runs/b").exists()
    for text, seen in (("book.txt", True), ("other/book.txt", False)):
        assert main(["eval", "runs/a", "--on", text, "--quiet"]) == 0
        assert (f"note: the run was trained or validated on {text}\n" in capsys.readouterr().err) == seen
    texts = json.loads(Path("runs/a/measured/perplexity.json").read_text())["result"]["texts"]
    assert [entry["seen"] for entry in texts] == [True, False]
    Path("book.txt").write_text("It was changed. " * 100)
    assert other in said(capsys, "train", "vanilla", "corpus=book.txt", *small, "--out", "runs/b")
    assert main(["train", "vanilla", "corpus=data/book-bytes", *small, "--quiet", "--out", "runs/b"]) == 0


def test_what_a_dry_run_cannot_know_and_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFORMER_HOME", raising=False)
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "steps=1", "device=cpu"]
    assert main(["train", "vanilla", "corpus=openwebtext", *small, "--dry-run"]) == 0
    tables = 16 * (50_304 + 16)  # GPT-2's ids, padded, and positions
    counted = int(re.search(r"parameters +([\d,]+)", capsys.readouterr().out)[1].replace(",", ""))
    assert tables < counted < tables + 16_000
    assert "There is no source 'opnwebtext'" in said(
        capsys, "train", "vanilla", "corpus=opnwebtext", *small, "--dry-run"
    )
    Path("train.bin").write_bytes(bytes(2000))
    assert main(["prepare", "train.bin", "--tokenizer", "bytes", "--out", "data/alone"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "it has no validation text; a file with 'val' in its name makes one" in printed
    assert "suits so short a text" not in printed
    assert "The validation split has 0 tokens" in said(
        capsys, "train", "vanilla", "corpus=data/alone", *small, "--dry-run"
    )


def test_a_dry_run_of_too_short_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("word " * 30)
    corpus = str(tmp_path / "short")
    words = ["prepare", str(tmp_path / "short.txt"), "--tokenizer", "bytes", "--val-fraction", "0.3", "--out", corpus]
    assert main(words) == 0
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=64", "batch=4", "device=cpu"]
    refused = said(capsys, "train", "vanilla", f"corpus={corpus}", *small, "--dry-run")
    assert "The training split has" in refused
    assert "too few for a context of 64" in refused


def test_fields_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_text("id,text\n1,words\n")
    refused = said(capsys, "prepare", str(tmp_path / "table.csv"), "--field", "text", "--tokenizer", "bytes")
    assert "The option 'field' does not apply to" in refused


@pytest.mark.parametrize("beams", [[], ["--beams", "2"]])
def test_a_terminal_is_not_told_what_a_model_writes_to_it(
    beams: list[str], trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", str(trained), "a\x1b[31mb\x07\tc\nä", "--tokens", "1", "--device", "cpu", *beams]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("a\x1b[31mb\x07\tc\nä")  # a file has the text itself
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("a\\x1b[31mb\\x07\tc\nä")
