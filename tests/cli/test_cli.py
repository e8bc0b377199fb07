"""The command line: output that people read, JSON that programs read, one sentence for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import forked
import stepformer as sf
from architectures import covering_presets
from stepformer.catalogue import citations
from stepformer.catalogue.references import BIBTEX
from stepformer.cli import main
from stepformer.ops.kernels import constant_result
from stepformer.optim import OptimConfig


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in sf.presets())
    assert main(["list", "imex-ln-*", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sf.presets("imex-ln-*")
    assert rows[2]["calls"] == {"attn": 1, "mlp": 2}
    assert main(["list", "qqq"]) == 2
    assert "No preset matches" in capsys.readouterr().err


def test_list_json_without_matches_is_an_empty_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "qqq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("name", covering_presets())
def test_show_every_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["equations"]["layer"] == sf.preset(name).equation
    assert all(facts["equations"].values())
    assert facts["parameters"]["total"] == sf.build(name, device="meta").num_parameters()
    assert facts["hash"] == sf.model_config(name).hash
    assert main(["show", name, "--size", "tiny"]) == 0
    assert f"{sf.build(name, size='tiny', device='meta').num_parameters():,}" in capsys.readouterr().out
    assert main(["show", name, "--size", "tiny", "--cite"]) == 0
    bibtex = capsys.readouterr().out
    assert bibtex.count("@") == len(facts["cite"])
    assert "no entry" not in bibtex
    assert "jordan2024muon" in bibtex  # what trains it when nothing else is said


def test_show_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "yurii"]) == 0
    out = capsys.readouterr().out
    for piece in ("x' = x + v'", "mu_attn", "(0, 1)", "0.693147", "163,812,168", "162,239,304", "84,972,360", "1.078"):
        assert piece in out


def show(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["show", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_show_names_the_architecture_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Name, equation, paper and published figure belong to the resolved config, not to the word that was typed."""
    facts = show(capsys, "yurii", "splitting=strang")
    assert (facts["name"], facts["calls"]) == ("verlet-ama", {"attn": 2, "mlp": 1})
    assert "1.074" in facts["published"]
    facts = show(capsys, "yurii", "template=adam")
    assert (facts["name"], facts["cite"][0]) == ("adam", "gai2026momentum")
    assert show(capsys, "nesterov")["name"] == "nesterov-lie-trotter"
    facts = show(capsys, "adam", "splitting=strang", "order=mam", "norm=rmsnorm")
    assert (facts["name"], facts["published"]) == ("", "")
    assert facts["title"] == "adam x strang, norm=rmsnorm, order=mam"
    assert "gai2026momentum" not in facts["cite"]
    facts = show(capsys, "yurii", "--size", "medium")
    assert facts["equations"]["layer"] != ""
    assert facts["published"] == ""


def test_show_says_where_the_velocity_norm_goes(capsys: pytest.CaptureFixture[str]) -> None:
    once = show(capsys, "tmm", "splitting=imex", "k=2", "order=mam")["equations"]["splitting"]
    assert once.startswith("V = (beta v + gamma MLP(")
    assert "V' = LN_v(V')" in once
    every = show(capsys, "tmm", "splitting=imex", "velocity_norm=every")["equations"]["splitting"]
    assert every.startswith("V = LN_v(beta v + gamma attention(")


def test_show_estimates_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "yurii", "--size", "tiny", "--batch", "4"]) == 0
    assert "memory at batch 4" in capsys.readouterr().out


def test_two_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "yurii", "size=tiny", "--size", "small"]) == 2
    assert "Two sizes" in capsys.readouterr().err


def test_show_takes_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[model]\npreset = "adam"\nsize = "tiny"\n')
    assert main(["show", str(path), "n_layer=3"]) == 0
    assert "3 layers, 4 heads, width 128" in capsys.readouterr().out


def test_every_cited_reference_exists() -> None:
    for name in sf.presets():
        preset = sf.preset(name)
        for key in citations(preset.config):
            assert key in BIBTEX, key
    other = sf.model_config("yurii", norm="rmsnorm", positions="rotary")
    assert {"zhang2019root", "su2024roformer"} <= set(citations(other)) <= set(BIBTEX)
    assert "zimin2026yuriiformer" in citations(sf.model_config("yurii", aux_init="zero"))  # the rule is the paper's
    assert "zimin2026yuriiformer" not in citations(sf.model_config("vanilla", bias=True))  # GPT-2 is not
    optimizers = get_args(get_type_hints(OptimConfig)["name"])
    assert all(set(citations(other)) < set(citations(other, name)) <= set(BIBTEX) for name in optimizers)


def test_bad_input_is_one_sentence_and_status_2() -> None:
    for words, sentence in (
        (("show", "yuri"), "Did you mean 'yurii'?"),
        (("show", "yurii", "n_head=7"), "does not divide"),
        (("show", "yurii", "splitting=imex", "k=0"), "below its minimum 1"),
        (("show", "missing.toml"), "no config file"),
        (("show", "yurii", "--plugin", "missing.py"), "no plug-in file"),
        (("claims", "foo"), "numbered from 1 to 26"),
        (("audit", "qhm.py"), "the name that it registers, and --plugin qhm.py"),
        (("show", "yurii", "n_head"), "key=value"),
    ):
        done = forked.stepformer(*words)
        assert done.returncode == 2, words
        assert "Traceback" not in done.stderr
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_words_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "yurii", "--size", "tiny", "n_layer=2", "--json", "bias=true"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["n_layer"], config["bias"]) == (2, True)
    with pytest.raises(SystemExit) as stopped:
        main(["show", "yurii", "--colour", "n_layer=2"])
    assert stopped.value.code == 2


def test_help_teaches() -> None:
    done = subprocess.run([sys.executable, "-m", "stepformer", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "stepformer audit yurii" in done.stdout
    assert "obligations" in forked.stepformer("audit", "--help").stdout


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m stepformer list | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert "gd-euler" in done.stdout
    assert done.stderr == ""


RULE = """
def kick(self, s, c, g, scale):
    return s
def drift(self, s, c, scale):
    return s
sf.register_template("{}")(type("T", (sf.Template,), {{"kick": kick, "drift": drift, {}}}))
"""
FAULTS = {
    "'streams': {'w': 'zero'}": "The stream 'w' is 'zero': declare it as sf.Stream(",
    "'streams': lambda self: {}": "T.streams should be a table, such as",
    "'coefficients': {'rho': 0.5}": "The coefficient 'rho' is 0.5: declare it as sf.unit",
    "'kick': sf.Template.kick": "T is not a whole rule: define kick().",
    "'kick': None": "T.kick should be a method: def kick(self, s, c, g, scale).",
    "'refusal': lambda cls, config: None": "T.refusal should be a class method: put @classmethod above it.",
    "'refusal': classmethod(lambda cls: None)": "T.refusal() cannot be called as refusal(config), as",
}
FAULTS |= {
    f"'streams': {{'{name}': sf.Stream('zero', 'a')}}": f"A stream cannot be called '{name}', which every state has"
    for name in ("memory", "without", "replace", "x", "streams")
}
FAULTS |= {
    f"'options': {{'{name}': sf.Option(1.0, 'a')}}": f"Option '{name}' of template 'o' would hide what every template"
    for name in ("layer", "kick", "streams", "norm", "head_dim")
}
FAULTS |= {
    f"'options': {{'tau': sf.Option({given})}}": f"Option 'tau' of template 'o' has a bad default: {fault}"
    for given, fault in {
        "-1.0, 'a', minimum=0.0": "tau = -1.0 is below its minimum 0.",
        "'c', 'a', choices=('a', 'b')": "tau = 'c' is not one of 'a', 'b'.",
        "None, 'a'": "None is no number, word, true or false",
    }.items()
}


def test_plugins_load_once_and_report_their_own_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = tmp_path / "mine.py"
    rule.write_text(
        "import stepformer as sf\nfrom stepformer.rules.first_order import Nesterov\n"
        "@sf.register_template('mine', equation='as Nesterov')\nclass Mine(Nesterov):\n    pass\n"
    )
    for _ in range(2):
        assert main(["show", "mine", "--plugin", str(rule)]) == 0
    assert "as Nesterov" in capsys.readouterr().out
    assert main(["list", "mine", "--plugin", str(rule)]) == 0
    assert "mine x lie-trotter" in capsys.readouterr().out
    for text, sentence in (
        ("sf.register_template('nesterov')(type('Nesterov', (sf.Template,), {}))", "name 'nesterov' is already taken"),
        ("sf.register_preset('yurii', equation='', cite='')", "name 'yurii' is already taken"),
        ("sf.register_template('other')(dict)", "is a subclass of Template"),
        ("sf.Stream('nought', 'velocity')", "A stream starts from"),
        ("sf.unit(0.5, 'memori')", "kind is one of memory"),
        ("sf.unit(1.5)", "between 0 and 1"),
        ("sf.register_template('o')(type('T', (sf.Template,), {'options': {'tau': 1.0}}))", "stepformer.Option"),
        (
            "sf.register_template('o')(type('T', (sf.Template,), {'kick': lambda self, s, g: s}))",
            "T.kick(s, g) cannot be called as kick(s, c, g, scale), as every template is.",
        ),
        (
            "made = {'options': {'tau': sf.Option(1.0, 'x')}, '__init__': lambda self, n_head, head_dim: None}\n"
            "sf.register_template('o')(type('T', (sf.Template,), made))",
            "T.__init__(n_head, head_dim) cannot be called as __init__(n_head, head_dim, tau), as every template is.",
        ),
        (RULE.format("yurii", ""), "'yurii' is already taken: it is an alias of the preset 'nesterov-lie-trotter'."),
        (RULE.format("polyak", ""), "'polyak' is already taken: it is an alias of the template 'heavy-ball'."),
        (
            "sf.register_extra('o')(type('T', (sf.Extra,), {'coefficients': {}}))",
            "T.coefficients should be a method: def coefficients(self).",
        ),
        *((RULE.format("o", declared), sentence) for declared, sentence in FAULTS.items()),
    ):
        rule.with_name("odd.py").write_text(f"import stepformer as sf\n{text}\n")
        assert main(["list", "--plugin", str(rule.with_name("odd.py"))]) == 2
        assert sentence in capsys.readouterr().err
    rule.with_name("bad.py").write_text("1 / 0\n")
    assert main(["show", "mine", "--plugin", str(rule.with_name("bad.py"))]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert main(["show", "mine", "--plugin", "no.such.module"]) == 2
    assert "There is no plug-in module 'no.such.module'" in capsys.readouterr().err


def test_a_name_that_is_almost_one_of_the_base_class_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], registries: None
) -> None:
    """Nothing would call it. A name that is far from all of them, or overrides one, is nobody's business."""
    rule = tmp_path / "near.py"
    rule.write_text(
        "import stepformer as sf\nfrom stepformer.rules.first_order import Nesterov\n"
        "@sf.register_template('near', equation='as Nesterov')\nclass Near(Nesterov):\n"
        "    normalizes = 'v'\n    def qeury(self, s, c): ...\n    def helper(self): ...\n    def _kik(self): ...\n"
        "    def describe(self): return 'near'\n"
        "@sf.register_extra('near-too')\nclass NearToo(sf.Extra):\n    def enetr(self, s, c): ...\n"
    )
    assert main(["show", "near", "--plugin", str(rule)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "Near" in line]
    assert [line.split(": ", 1)[1] for line in said] == [
        "stepformer does not ask for Near.normalizes. Did you mean 'normalises'?",
        "stepformer does not ask for Near.qeury. Did you mean 'query'?",
        "stepformer does not ask for NearToo.enetr. Did you mean 'enter'?",
    ]


@pytest.mark.parametrize("words", [["show", "paced"], ["audit", "paced", "--steps", "30"], ["train", "paced"]])
def test_an_option_called_like_a_setting_of_a_run(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], registries: None
) -> None:
    rule = tmp_path / "paced.py"
    rule.write_text(
        "import stepformer as sf" + RULE.format("paced", "'options': {'steps': sf.Option(1, 'of the pace')}")
    )
    assert main([*words, "--plugin", str(rule)]) == 2
    said = "The template 'paced' names an option 'steps', which is a config key: give it another name."
    assert said in capsys.readouterr().err


def test_a_command_does_not_load_the_compiler() -> None:
    """It would double the two seconds of torch. What stands in for its mark on functions sets the same one."""
    code = "import sys; from stepformer.cli import main; main(['show', 'yurii']); print('torch._dynamo' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).endswith("\nFalse\n")
    marked = [mark(lambda: None).__dict__ for mark in (constant_result, torch.compiler.assume_constant_result)]
    assert marked[0] == marked[1] != {}
