"""Configuration: typed, all problems at once, suggestions, TOML, overrides, a stable hash."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepformer as sf
from helpers import TINY
from stepformer.base.arguments import checks
from stepformer.base.errors import InputError
from stepformer.base.words import parse_override
from stepformer.catalogue import SIZES, closest_preset
from stepformer.cli import main
from stepformer.data import Batches, open_source
from stepformer.data.prepare import prepare
from stepformer.optim import OptimConfig, Optimizers
from stepformer.rules import templates
from stepformer.training import RunConfig
from stepformer.training.runs import as_toml


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.model_config("yurii", n_head=7, n_layer=0, norm_eps=-1.0, vocab=5, order="ama", splitting="strang")
    problems = caught.value.problems
    assert len(problems) == 4
    text = "\n".join(problems)
    assert "n_layer = 0 should be at least 1" in text
    assert "n_head = 7 does not divide d_model = 768" in text
    assert "n_head = 6 would, or d_model = 770" in text
    assert "norm_eps" in text
    assert "Unknown key 'vocab'. Did you mean 'vocab_size'?" in text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"template": "nestorov"}, "Unknown template 'nestorov'. Did you mean 'nesterov'?"),
        ({"splitting": "strange"}, "Did you mean 'strang'?"),
        ({"attention": "softmx"}, "Did you mean 'softmax'?"),
        ({"mlp": "relu"}, "Unknown mlp 'relu'"),
        ({"n_layer": 2.5}, "n_layer = 2.5 should be of type int"),
        ({"n_layer": True}, "n_layer = True should be of type int"),
        ({"bias": 1}, "bias = 1 should be of type bool"),
        ({"norm": "batch"}, "norm = 'batch' is not one of 'layernorm', 'rmsnorm'"),
        ({"aux_init": "ones"}, "is not one of 'embed', 'zero'"),
        ({"real_vocab": 60_000}, "between 1 and vocab_size"),
        ({"positions": "rotary", "d_model": 36, "n_head": 12}, "is odd"),
        ({"splitting": "imex", "template": "nesterov", "k": "two"}, "k = 'two' should be of type int"),
        ({"splitting": "imex", "template": "nesterov", "order": "amam"}, "is not one of 'ama', 'mam'"),
        ({"mlp_hidden": 0}, "mlp_hidden = 0"),
        ({"aux_norm_gain": float("nan")}, "aux_norm_gain = nan is not finite"),
        ({"bias": "yes"}, "true or false"),
        ({"attention_backend": "flash"}, "is not one of 'sdpa', 'math'"),
    ],
)
def test_each_problem_has_its_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.ModelConfig.from_dict(settings)
    assert sentence in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"n_layer": np.int64(2), "aux_norm_gain": np.float32(0.5), "logit_softcap": np.float64(3), "bias": np.True_}
    plain = {"n_layer": 2, "aux_norm_gain": 0.5, "logit_softcap": 3.0, "bias": True}
    config = sf.model_config("imex-k1-ama", k=np.int64(3), **given)
    assert repr(config) == repr(sf.model_config("imex-k1-ama", k=3, **plain))
    run = sf.run_config("yurii", steps=np.int64(9), lr=np.float64(0.1), radius=None, clip=np.float32(2))
    assert as_toml(run) == as_toml(sf.run_config("yurii", steps=9, lr=0.1, clip=2.0))
    (first, second) = (sf.build("yurii", size="tiny", n_layer=1, seed=seed) for seed in (np.int64(3), 3))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    with pytest.raises(sf.ConfigError, match=r"^n_layer = 2\.0 should be of type int\.$"):
        sf.model_config("yurii", n_layer=np.float64(2))


def test_what_build_is_not_made_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"takes a name, a TOML file or a ModelConfig, not NoneType\.$"):
        sf.build(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ModelConfig\.from_dict makes one of a dict"):
        sf.build({"template": "gd"})  # type: ignore[arg-type]
    with pytest.raises(sf.ConfigError, match=r"Unknown size '\['tiny'\]'"):
        sf.build("vanilla", size=["tiny"])  # type: ignore[arg-type]
    (tmp_path / "run.json").touch()
    with pytest.raises(InputError, match="is a run, not the name of an architecture: `load_run` opens it"):
        sf.build(tmp_path)
    with pytest.raises(InputError, match="'vanilla' is no file but the name of an architecture: `model_config` takes"):
        sf.load_config("vanilla")


class Row:
    """A split of a hundred tokens."""

    def __len__(self) -> int:
        return 100

    def gather(self, starts: Any, length: int) -> Any:
        return starts[:, None] + np.arange(length)


def model() -> sf.Model:
    return sf.build("vanilla", **TINY)


def test_arguments_of_public_functions_are_what_their_annotations_say() -> None:
    @checks(number=1)
    def called(number: int, names: Sequence[str] = (), *rest: int, seeds: int | Sequence[int] = 1, **more: str) -> Any:
        return number, names, rest, seeds, more

    assert called(np.int64(2), "a", "b", seeds=range(2), x=3) == (2, ["a"], ("b",), [0, 1], {"x": 3})  # type: ignore[arg-type]
    assert called(2, [Path("a")]) == (2, [Path("a")], (), 1, {})  # type: ignore[list-item]
    for wrong, sentence in (
        ({"number": 0}, "number = 0 should be at least 1"),
        ({"number": True}, "number = True should be of type int"),
        ({"number": 1, "names": 3}, r"names = 3 should be a list, such as names=\[3\]"),
        ({"number": 1, "names": ["a", 3]}, r"names\[1\] = 3 should be of type str or Path"),
        ({"number": 1, "seeds": "3"}, "seeds = '3' should be a list"),
        ({"number": 1, "seeds": True}, "seeds = True should be a list"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            called(**wrong)
    with pytest.raises(TypeError, match=r"called\(\) missing 1 required positional argument: 'number'"):
        called()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sf.train(model()), "`train` takes a name or what `run_config` gives, not Model"),
        (lambda: sf.train(sf.run_config("yurii"), steps=3), "a config, which settles steps: give them to `run_config`"),
        (lambda: sf.train("yurii", "x", label=3), r"label = 3 should be of type str\."),
        (lambda: sf.train("yurii", "x", max_seconds="1m"), "max_seconds = '1m' should be of type float or nothing"),
        (lambda: sf.compare("vanilla", "yurii", out="x", seeds=[1, 1]), "The seed 1 stands twice in '1,1'"),
        (lambda: sf.compare("vanilla", "yurii", out="x", seeds=1.5), "seeds = 1.5 should be a list, such as"),
        (lambda: sf.compare("vanilla", "yurii", out="x", jobs=0), "jobs = 0 should be at least 1"),
        (
            lambda: sf.compare("vanilla", "yurii", out="x", confidence="0.9"),
            "confidence = '0.9' should be of type float",
        ),
        (lambda: sf.sweep("yurii", {"lr": "1,2"}, out="x"), r"values of 'lr' should be a list, such as \['1,2'\]"),
        (lambda: sf.sweep("yurii", {"lr": 0.1}, out="x"), r"values of 'lr' should be a list, such as \[0\.1\]"),
        (lambda: sf.sweep("yurii", ["lr=0.1"], out="x"), "takes a table of lists"),
        (lambda: sf.ModelConfig.from_dict([1]), r"is a table of keys, not \[1\]"),
        (lambda: sf.audit("yurii", steps=5), "steps = 5 should be at least 30"),
        (
            lambda: sf.evaluate_run("x", corpus=Row()),
            "corpus = .*Row object.* should be of type str or Path or nothing",
        ),
        (lambda: sf.evaluate_run("x", micro_batch=0), "micro_batch = 0 should be at least 1"),
        (lambda: Batches(Row(), 0, 1, 0), "context = 0 should be at least 1"),
        (lambda: Batches(Row(), 4, 2.5, 0), r"batch = 2\.5 should be of type int"),
        (lambda: Batches(Row(), 4, 1, None), "seed = None should be of type int"),
        (lambda: Batches(Row(), 4, 1, 0).batch(0.5), r"step = 0\.5 should be of type int"),
        (lambda: model().generate([[1]], max_new_tokens="3"), "max_new_tokens = '3' should be an integer"),
        (lambda: sf.run_config(sf.model_config("yurii")), "not ModelConfig; `stepformer.compare` takes a ModelConfig"),
        (lambda: sf.run_config("yurii", {"steps": 3}), r"or keywords: give \*\*\{'steps': 3\}"),
        (lambda: sf.compare(["vanilla", "yurii"], out="x"), r"one by one: compare\(\*\['vanilla', 'yurii'\], "),
        (lambda: sf.load_run(None), "takes a run's folder, not NoneType: of a loaded run, run.folder.path"),
        (lambda: sf.audit(model()), r"not Model: of a model, model\.config"),
        (lambda: Optimizers(model(), OptimConfig(), "10"), "steps = '10' should be of type int"),
        (lambda: Optimizers(model(), OptimConfig(), 0), "steps = 0 should be at least 1"),
        (lambda: prepare("notes.txt", "bytes", "x"), "`prepare` takes what `open_source` gives, not str"),
        (lambda: open_source(["a.txt", "b.txt"]), r"one by one: open_source\(\*\['a\.txt', 'b\.txt'\]\)"),
        (lambda: Batches(object(), 4, 1, 0), r"such as corpus\.split\('train'\), not something of type object"),
        (lambda: Batches(torch.arange(100), 4, 1, 0), "not something of type Tensor"),
        (lambda: Batches(Row(), 4, 0, 0), "at least 1 sequence, not batch = 0"),
        (lambda: Batches(Row(), 4, 1, 0).batch(-1), "There is no step -1: the first one is 0"),
        (lambda: sf.save_run(model(), model(), "bytes"), r"not Model: save_run\(model, out, tokenizer\)"),
        (lambda: model()(torch.zeros(1, 2, dtype=torch.long), cache=True), r"what new_cache\(\) made, not bool"),
        (lambda: model().new_cache(0), "A cache holds 1 row or more, not 0"),
    ],
)
def test_something_else_in_its_place(call: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call()


def test_unknown_names_suggest_the_nearest() -> None:
    for name in ("yuri", "YURII"):
        with pytest.raises(sf.ConfigError, match="Did you mean 'yurii'"):
            sf.build(name)
    with pytest.raises(sf.ConfigError) as caught:
        sf.build("yurii", size="smal", n_layr=3)
    assert [problem.split("?")[0] for problem in caught.value.problems] == [
        "Unknown size 'smal'. Did you mean 'small'",
        "Unknown key 'n_layr'. Did you mean 'n_layer'",
    ]


def test_aliases_are_the_same_architecture() -> None:
    for alias, name in (("hb", "polyak-lie-trotter"), ("vanilla", "gd-lie-trotter"), ("tmm-lie-trotter", "tmm")):
        assert sf.model_config(alias) == sf.model_config(name)
    assert sf.ModelConfig(template="tmm", splitting="verlet") == sf.ModelConfig(
        template="triple-momentum", splitting="strang"
    )


def test_round_trips() -> None:
    for name in sf.presets():
        config = sf.model_config(name, size="tiny", aux_norm_gain=0.05)
        assert sf.ModelConfig.from_dict(config.to_dict()) == config
        assert pickle.loads(pickle.dumps(config)) == config
        assert copy.deepcopy(config) == config
        assert len({config, copy.deepcopy(config)}) == 1


def test_hash_is_stable() -> None:
    """Pinned values: a changed hash would orphan every stored result, so a change here must be deliberate."""
    assert sf.model_config("yurii").hash == "e1dcf17fe5f9"
    assert sf.model_config("vanilla", size="tiny").hash == "16e2f3cbff4a"


def test_hash_distinguishes_architectures_and_nothing_else() -> None:
    hashes = {sf.model_config(name).hash for name in sf.presets()}
    assert len(hashes) == len(sf.presets())
    base = sf.model_config("imex-k1-ama")
    assert base.replace(k=1).hash == base.hash
    assert base.replace(k=2).hash != base.hash
    assert base.replace(activation_checkpointing=True, attention_backend="math").hash == base.hash
    assert base.replace(aux_norm_gain=0.05).hash != base.hash
    assert base.replace(mlp_hidden=3072).hash == base.hash
    assert base.replace(real_vocab=None).hash == base.hash
    assert base.replace(aux_norm_gain=2) == base.replace(aux_norm_gain=2.0)
    assert base.replace(aux_norm_gain=2).hash == base.replace(aux_norm_gain=2.0).hash
    vanilla = sf.model_config("vanilla")
    assert vanilla.replace(aux_init="zero", aux_norm_gain=0.5).hash == vanilla.hash
    assert base.replace(norm_eps=1e-6).hash != base.hash
    streams = sf.model_config("mhc")
    assert streams.replace(aux_init="zero").hash == streams.hash
    assert streams.replace(aux_init="zero", tables=1).hash != streams.replace(tables=1).hash


def test_naming_the_vocabulary_again_keeps_its_padding() -> None:
    assert sf.model_config("yurii", vocab_size=50_304).real_vocab == 50_257
    assert sf.model_config("yurii", vocab_size=50_304) == sf.model_config("yurii")


def test_option_types_are_checked_even_when_they_equal_the_default() -> None:
    for value in (True, 1.0):
        with pytest.raises(sf.ConfigError, match="should be of type int"):
            sf.model_config("imex-k1-ama", k=value)
    with pytest.raises(sf.ConfigError, match="final_drift"):
        sf.model_config("symplectic-euler", final_drift=0)


def test_problems_of_different_kinds_are_reported_together() -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.ModelConfig.from_dict({"template": "nestorov", "n_head": 7, "n_layer": "two", "foo": 3})
    assert len(caught.value.problems) == 4


def problems_of(call: Callable[[], object]) -> list[str]:
    """The beginnings of all sentences of a ConfigError, up to the first colon, full stop or question."""
    with pytest.raises(sf.ConfigError) as caught:
        call()
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return [re.split(r"[:;?]|\. |\.$", problem)[0] for problem in caught.value.problems]


def test_what_components_refuse_is_reported_beside_wrong_types() -> None:
    config = {"attention": "linear", "positions": "rotary", "bias": True, "n_layer": "two", "foo": 3, "norm_eps": -1.0}
    assert problems_of(lambda: sf.ModelConfig.from_dict({**config, "options": 5})) == [
        "options = 5 should be a table",
        "n_layer = 'two' should be of type int",
        "norm_eps = -1.0 should be above 0",
        "Unknown key 'foo'",
        "Attention 'linear' has nothing that rotary positions could rotate",
        "Attention 'linear' is made of bilinear forms, which a bias would break",
    ]


def test_every_refusal_of_one_component_is_reported() -> None:
    hamiltonian = {"attention": "hamiltonian", "force": "full", "kernel": "per-head", "metric": "derived", "bias": True}
    assert problems_of(lambda: sf.ModelConfig.from_dict({**hamiltonian, "template": "nesterov", "n_head": 7})) == [
        "n_head = 7 does not divide d_model = 768",
        "Attention 'hamiltonian' moves x and a momentum by its own two fields, and template 'nesterov' does not "
        "integrate them",
        "Attention 'hamiltonian' is made of bilinear forms, which a bias would break",
        "force = 'full', the whole gradient of the masked energy, hears from later tokens and reads the future "
        "(docs/reading-the-future.md)",
        "metric = 'derived' inverts A, which has low rank for kernel = 'per-head'",
    ]
    alone = {"template": "ab2", "splitting": "strang", "aux_init": "zero", "n_layer": 1, "mlp_step": "A"}
    assert problems_of(lambda: sf.ModelConfig.from_dict(alone)) == [
        "Template 'ab2' integrates the two fields of a Hamiltonian attention, and attention 'softmax' has none",
        "Template 'ab2' brings its own integrator, which splitting 'strang' cannot divide",
        "In a single layer a momentum that starts at zero moves nothing, unless the MLP follows it",
    ]


def test_what_only_follows_from_another_problem_is_not_reported() -> None:
    """A template that nobody knows has no opinion about the attention, and an unknown size no width."""
    assert problems_of(lambda: sf.model_config("yurii", template="nestrov", attention="hamiltonian")) == [
        "Unknown template 'nestrov'"
    ]
    assert problems_of(lambda: sf.model_config("yurii", splitting=["a"], k=2)) == [
        "Unknown splitting '['a']'",
        "k = 2 has no meaning here",
    ]
    assert problems_of(lambda: sf.model_config("yuri", size="tinny", k=2, n_head=5, n_layer=0, foo=3)) == [
        "Unknown size 'tinny'",
        "Unknown preset 'yuri'",
        "n_layer = 0 should be at least 1",
        "Unknown key 'foo'",
    ]


BROKEN_RUN = """
steps = 5
[modle]
n_layer = 3
[model]
preset = "yuri"
n_layer = "two"
norm_eps = -1.0
learning_rate = 3
[data]
corpus = "tinystories"
count = 7
tokenzier = "bytes"
[optim]
lr = "fast"
sam = "decay"
beta1 = 1.5
warmup = 500
[train]
steps = 10
batch = 5
micro_batch = 2
keep = 0
"""


def test_all_problems_of_a_run_are_reported_at_once(tmp_path: Path) -> None:
    """Outside sections, in every section, between sections, and in the words of the command line."""
    path = tmp_path / "run.toml"
    path.write_text(BROKEN_RUN)
    words = ["junk", "optim.radius=3", "=4", "stream_norms=true", "train.parallel=fsdp"]
    assert problems_of(lambda: sf.run_config(path, words)) == [
        f"'steps' in {path} stands outside a section",
        f"Unknown section '[modle]' in {path}",
        "'junk' is not of the form key=value",
        "'=4' is not of the form key=value",
        "[data] Unknown key 'tokenzier'",
        "[data] dialect and count belong to corpus = 'tales'",
        "[optim] lr = 'fast' should be of type float or nothing",
        "[optim] beta1 = 1.5 should be below 1",
        "[optim] sam = 'decay' needs schedule = 'wsd'",
        "[optim] radius = 3 belongs to name = 'scion'",
        "[train] keep = 0 should be at least 1",
        "[train] micro_batch = 2 does not divide the 5 sequences of a step (batch)",
        "[train] stream_norms = true needs the whole model on a rank",
        "[optim] warmup = 500 is longer than the run of 10 steps",
        "[model] Unknown preset 'yuri'",
        "[model] n_layer = 'two' should be of type int",
        "[model] norm_eps = -1.0 should be above 0",
        "Unknown key 'learning_rate'",
    ]
    assert problems_of(lambda: sf.load_config(path, ["n_head=0", "junk"])) == [
        f"'steps' in {path} stands outside a section",
        f"Unknown section '[modle]' in {path}",
        "'junk' is not of the form key=value",
        "Unknown preset 'yuri'",
        "n_layer = 'two' should be of type int",
        "n_head = 0 should be at least 1",
        "norm_eps = -1.0 should be above 0",
        "Unknown key 'learning_rate'",
    ]


def test_a_name_that_nobody_knows_hides_no_other_problem(tmp_path: Path) -> None:
    assert problems_of(lambda: sf.run_config("yuri", ["steps=0", "warmup=2000", "lr=fast", "n_layer=0"])) == [
        "Unknown preset 'yuri'",
        "[optim] lr = 'fast' should be of type float or nothing",
        "[train] steps = 0 should be at least 1",
        "[model] n_layer = 0 should be at least 1",
    ]
    for words in ([], ["preset=yurii"]):
        with pytest.raises(sf.StepformerError, match=r"Did you mean 'yurii'.* No recipe has that name either"):
            sf.run_config("yuri", words)


def test_options_share_their_names_with_each_other_and_with_the_sections(registries: None) -> None:
    for name, option in (("test-tau", "tau"), ("test-steps", "steps")):
        own = type(name, (templates["gd"].component,), {"options": {option: sf.Option(1.0, "a number")}})
        sf.register_template(name, equation="as gd")(own)
    with pytest.raises(
        sf.ConfigError, match="The template 'test-tau' and the attention 'entropy' both name an option 'tau'"
    ):
        sf.model_config("test-tau", attention="entropy")
    with pytest.raises(
        sf.ConfigError, match="The template 'test-steps' names an option 'steps', which is a config key"
    ):
        sf.run_config("test-steps")


def test_the_sections_of_a_kept_run_are_checked_together() -> None:
    values = sf.run_config("yurii").to_dict()
    values["model"]["n_layer"], values["optim"]["floor"], values["train"]["steps"] = 0, 2.0, "many"
    assert problems_of(lambda: RunConfig.from_dict(values)) == [
        "[optim] floor = 2.0 should be at most 1",
        "[train] steps = 'many' should be of type int",
        "[model] n_layer = 0 should be at least 1",
    ]


def test_words_that_are_not_words() -> None:
    for settings in ({"template": 5}, {"name": "x"}, {"options": 3}, {"attention": None}):
        with pytest.raises(sf.ConfigError):
            sf.model_config("yurii", **settings)
    with pytest.raises(sf.ConfigError):
        sf.model_config("yurii", size=5)  # type: ignore[arg-type]


def test_toml_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text('[model]\npreset = "yurii"\nsize = "tiny"\nn_layer = 3\naux_norm_gain = 0.05\n')
    config = sf.load_config(path)
    assert (config.template, config.n_layer, config.d_model, config.aux_norm_gain) == ("nesterov", 3, 128, 0.05)
    changed = sf.load_config(path, ["model.n_layer=5", "splitting=imex", "k=2", "size=small"])
    assert (changed.n_layer, changed.splitting, changed.option("k"), changed.d_model) == (5, "imex", 2, 768)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[model]\nn_layers = 3\n", "Unknown key 'n_layers'. Did you mean 'n_layer'?"),
        ("[modle]\nn_layer = 3\n", r"Unknown section '\[modle\]'.* Did you mean 'model'"),
        ("[model\n", "not valid TOML"),
        ("", "has no \\[model\\] table"),
        ("preset = 'yurii'\n", "put it under \\[model\\]"),
        ("[model]\nprest = 'yurii'\n", "Did you mean 'preset'"),
        ('[model]\npreset = "adamm"\n', "Did you mean 'adam'"),
    ],
)
def test_bad_toml(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(sf.StepformerError, match=sentence):
        sf.load_config(path)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(sf.InputError, match="no config file"):
        sf.load_config(tmp_path / "none.toml")
    with pytest.raises(sf.InputError, match="a folder"):
        sf.load_config(tmp_path)


def test_a_size_on_the_command_line_replaces_measures_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[model]\npreset = "adam"\nn_layer = 7\nd_model = 96\nn_head = 3\ncontext = 40\nqk_norm = true\n')
    wanted = sf.model_config("adam", size="tiny", qk_norm=True)
    assert sf.load_config(path, ["size=tiny"]) == wanted
    assert sf.run_config(path, ["size=tiny"]).model == wanted == sf.run_config(path, size="tiny").model
    assert sf.run_config(path, ["size=tiny", "n_layer=5"]).model.n_layer == 5
    assert sf.run_config(path).model.n_layer == sf.load_config(path).n_layer == 7


def test_overrides_are_read_as_toml_or_as_words() -> None:
    assert parse_override("k=2") == ("k", 2)
    assert parse_override("bias=true") == ("bias", True)
    assert parse_override("gain=5e-2") == ("gain", 0.05)
    assert parse_override("gain=.05") == ("gain", 0.05)
    assert parse_override("gain=-.5") == ("gain", -0.5)
    assert parse_override("corpus=.5-folder") == ("corpus", ".5-folder")
    assert parse_override("bias=True") == ("bias", True)
    assert parse_override("template=nesterov") == ("template", "nesterov")
    assert parse_override('template="nesterov"') == ("template", "nesterov")
    for word in ("k", "=2"):
        with pytest.raises(sf.InputError, match="key=value"):
            parse_override(word)


def test_overrides_are_a_list(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\npreset = "hb"\n')
    for read in (lambda: sf.run_config("yurii", "steps=3"), lambda: sf.load_config(tmp_path / "mine.toml", "steps=3")):
        with pytest.raises(
            sf.InputError, match=r"^Settings are a list of words: give \['steps=3'\] instead of 'steps=3'\.$"
        ):
            read()


def test_there_is_no_dropout() -> None:
    for key in ("dropout", "attn_dropout"):
        with pytest.raises(sf.ConfigError, match=rf"^There is no dropout: leave out {key}\.$"):
            sf.model_config("yurii", **{key: 0.1})
        with pytest.raises(sf.ConfigError, match=rf"^\[model\] There is no dropout: leave out {key}\.$"):
            sf.run_config("yurii", [f"{key}=0.1"])


def test_presets_match_patterns() -> None:
    assert sf.presets("imex-*") == [name for name in sf.presets() if name.startswith("imex-")]
    assert sf.presets("hb") == ["polyak-lie-trotter"]
    assert sf.presets("nothing") == []


def test_build_takes_a_name_a_file_or_a_config(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\npreset = "hb"\nsize = "tiny"\nn_layer = 1\n')
    from_file = sf.build(tmp_path / "mine.toml", seed=0)
    config = sf.model_config("hb", size="tiny", n_layer=1)
    assert from_file.config == config == sf.build(config, seed=0).config
    assert sf.build(config, n_layer=2).config.n_layer == 2
    assert sf.build(config, size="tiny").config.n_layer == 4
    assert sf.build(tmp_path / "mine.toml", size="tiny", d_model=64).config.d_model == 64
    with pytest.raises(sf.InputError, match="seed"):
        sf.build(config, seed="a")  # type: ignore[arg-type]


def test_build_takes_overrides_from_python() -> None:
    model = sf.build("yurii", size="medium", **TINY, seed=0)
    assert model.config.n_layer == 2
    assert model.config.context == 8


def test_stored_runs_of_etd_ab2_keep_their_method() -> None:
    """A run stores components and options that are no defaults, not the name of its preset, which has changed since."""
    stored = {"template": "etd-ab2", "splitting": "lie-trotter", "attention": "hamiltonian", "mlp": "gelu"}
    config = sf.ModelConfig.from_dict({**stored, **SIZES["small"], "aux_init": "zero"})
    assert (config.option("etd"), config.hash) == ("cox-matthews", "89e8d27c81b9")  # as of version 0.6.0
    named = sf.model_config("symp-etd-ab2")
    assert (named.option("etd"), named.replace(etd="cox-matthews")) == ("lawson", config)
    assert RunConfig(config).title == "symp-etd-ab2-etd=cox-matthews"


def test_a_stored_run_keeps_nothing_of_other_optimizers() -> None:
    """What trust looks at may have another default one day: a run of muon reads the same."""
    config = sf.run_config("vanilla", ["optim.name=muon"])
    stored = config.to_dict()
    stored["optim"] |= {"probe": 4096, "radius": 2.0}
    assert RunConfig.from_dict(stored) == config
    assert "probe" not in as_toml(config)
    trust = sf.run_config("vanilla", ["optim.name=trust", "probe=64"])
    assert RunConfig.from_dict(trust.to_dict()) == trust
    assert "probe = 64" in as_toml(trust)
    assert "own_init" not in as_toml(trust)


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        ("vanilla", "aux_norm_gain=0.1", "template 'gd' has no normalised stream"),
        ("vanilla", "model.aux_init=zero", "no stream of template 'gd' starts from a table"),
        ("vanilla", "output_norm_gain=0.1", "output_norm is off"),
        ("nesterov", "aux_norm_gain=0.1", ""),
        ("nesterov", "aux_init=zero", ""),
    ],
)
def test_a_setting_that_changes_nothing_is_told(
    name: str, setting: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", name, setting, "--size", "tiny"]) == 0
    said = capsys.readouterr().err
    assert said == (f"note: {setting.replace('=', ' = ')} changes nothing: {reason}.\n" if reason else "")


def test_another_mlp_stands_in_a_runs_name_and_makes_no_row_of_a_paper() -> None:
    for name, mlp in (("modern", "relu2"), ("glide", "gelu"), ("yurii", "swiglu")):
        config = sf.model_config(name, mlp=mlp)
        assert RunConfig(config).title == f"{name}-mlp={mlp}"
        row, _ = closest_preset(config)
        assert row is None or row.config.mlp == mlp
