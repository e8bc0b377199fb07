"""The audit passes what is right and catches what is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import leaky  # noqa: F401  (registers the leaking templates)
import stepformer as sf
from helpers import short_audit
from stepformer.cli import main
from stepformer.measure.diagnostics import audit as audit_module
from stepformer.measure.diagnostics.audit import OBLIGATIONS, Audit, audit
from stepformer.measure.diagnostics.second_versions import load_transcription
from stepformer.rules.first_order import GradientDescent, Nesterov
from transcriptions.adapter import transcribe


def failures(result: Audit) -> dict[int, str]:
    return {check.obligation: check.detail for check in result.checks if not check.passed}


# tests/model/test_combinations.py audits every template, splitting and attention in the fast set
QUICK = ("vanilla", "symplectic-euler", "adamw", "linear-yurii", "symp-ab2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in sf.presets()])
def test_short_audit(name: str) -> None:
    """All six obligations; three training steps only show that it trains, test_full_audit takes all of them."""
    result = short_audit(sf.preset(name).config, name, steps=3, transcription=transcribe)
    assert failures(result) == {}
    details = {check.obligation: check.detail for check in result.checks}
    assert "tr " in details[6]
    if name == "tmm-zero":
        assert details[5] == "gradient 0: 0.mu_attn, 0.beta_attn"
    if name == "symplectic-euler":
        assert details[5] == "5 unused"


@pytest.mark.slow
@pytest.mark.parametrize("name", sf.presets())
def test_full_audit(name: str) -> None:
    assert failures(audit(sf.preset(name).config, name, transcription=transcribe)) == {}


def test_a_stream_that_mixes_tokens_fails() -> None:
    broken = failures(audit(sf.model_config("leak-shift"), "leak-shift", steps=90))
    assert "change the logits before them" in broken[2]
    assert "cached logits differ" in broken[3]
    assert "below ln V" in broken[4]  # it learns to read the next token: below ln V


def test_a_statistic_of_the_whole_sequence_fails() -> None:
    broken = failures(audit(sf.model_config("leak-statistic"), "leak-statistic", steps=60))
    assert "change the logits before them" in broken[2]
    assert "cached logits differ" in broken[3]


def one_off(template: type[sf.Template], **registration: Any) -> Audit:
    """Audit a template under a name of its own."""
    config = registered(template, **registration)
    return audit(config, config.template, steps=30)


def registered(template: type[sf.Template], **registration: Any) -> sf.ModelConfig:
    name = f"broken-{template.__name__.lower()}"
    sf.register_template(name, **{"equation": "broken on purpose", **registration})(template)
    return sf.model_config(name)


def fault_in_building(template: type[sf.Template]) -> str:
    """What the first check alone says."""
    with mock.patch.object(audit_module, "OBLIGATIONS", {1: "builds"}):
        return failures(one_off(template))[1]


def test_a_statistic_of_the_batch_fails() -> None:
    class Batched(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g - g.mean(0, keepdim=True), scale)

    assert "a row's logits depend on the other rows of its batch" in failures(one_off(Batched))[2]


def test_noise_is_no_statistic_of_the_batch() -> None:
    class Noisy(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g + 1e-6 * torch.randn_like(g), scale)

    found = failures(one_off(Noisy))[2]
    assert "the same tokens again give logits that differ by" in found
    assert "noise, or something kept from an earlier call" in found


@pytest.mark.parametrize("method", ["enter", "leave"])
@pytest.mark.usefixtures("registries")
def test_an_extra_that_changes_or_assigns_fails(method: str) -> None:
    class Extra(sf.Extra):
        assigns = False

        def changed(self, s: sf.State, c: sf.Values) -> sf.State:
            if self.assigns:
                s.x = 0.9 * s.x
            else:
                s.x.mul_(0.9)
            return s

    for assigns, said in (
        (False, "the extra 'odd-0' changes x in place"),
        (True, f"{method}() assigns to x of the state"),
    ):
        name, parts = f"odd-{assigns:d}", {method: Extra.changed, "assigns": assigns}
        sf.register_extra(name, equation="x' = 0.9 x")(type(f"Odd{assigns:d}", (Extra,), parts))
        with mock.patch.object(audit_module, "OBLIGATIONS", {1: "builds"}):
            found = audit(sf.model_config("vanilla", extras=[name]), "vanilla-odd", steps=30)
        assert said in failures(found)[1]


def test_a_detached_gradient_fails() -> None:
    class Detached(Nesterov):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g.detach(), scale)

    broken = failures(one_off(Detached))
    assert re.search(r"^blocks\S+ receives no gradient \(nor do blocks\S+, (blocks\S+, ){3}\.\.\.\) and", broken[5])


@pytest.mark.usefixtures("registries")
def test_a_drift_that_the_splitting_never_calls_fails_unless_it_follows_the_velocity() -> None:
    class Own(Nesterov):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return s.replace(x=s.x + 2.0 * s.v)

    class Other(Nesterov):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return s.replace(x=0.5 * s.x + s.v)

    for rule, splitting, fault in (
        (Own, "symplectic-euler", ""),
        (Other, "imex", ""),
        (
            Other,
            "symplectic-euler",
            "1 builds: splitting 'symplectic-euler' lets x follow v and never calls drift",
        ),
    ):
        found = audit_module.first_look(registered(rule).replace(splitting=splitting))
        assert found == "" if not fault else fault in found


def test_a_wrong_backward_fails() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, g: Tensor) -> Tensor:
            return g.clone()

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> Tensor:
            return 0.5 * upstream[0]

    class WrongBackward(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, Half.apply(g), scale)

    assert "finite differences" in failures(one_off(WrongBackward))[6]


def test_infinite_gradients_fail() -> None:
    class Root(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, (g - g).sqrt(), scale)

    assert 5 in failures(one_off(Root))


def test_a_rule_that_fails_is_reported_and_not_raised() -> None:
    class Unfinished(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return sf.Template.kick(self, s, c, g, scale)

    broken = failures(one_off(Unfinished))
    assert "define kick()" in broken[1]


def test_a_rule_without_an_equation_fails() -> None:
    class Silent(GradientDescent):
        pass

    assert "states no equation" in failures(one_off(Silent, equation=""))[1]


def test_nan_in_decoding_alone_fails() -> None:
    """One new token at a time is NaN, whole sequences are fine: a maximum that drops NaN would not see it."""

    class NanAlone(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g * float("nan") if g.shape[1] == 1 else g, scale)

    assert "cached logits differ by nan" in failures(one_off(NanAlone))[3]


def test_a_rule_that_is_nan_everywhere_fails_everywhere() -> None:
    class NanAlways(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g * float("nan"), scale)

    broken = failures(one_off(NanAlways))
    assert set(broken) == {2, 3, 4, 5, 6}
    assert "not finite" in broken[4]


def test_a_rule_without_gradients_fails() -> None:
    class Sign(Nesterov):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            s = super().kick(s, c, g, scale)
            return s.replace(v=torch.sign(s.v))

    assert "zero everywhere for" in failures(one_off(Sign))[5]


def test_the_contract_is_checked() -> None:
    class KickMovesX(Nesterov):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g, scale).replace(x=s.x + g)

    class InPlace(Nesterov):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            s.v.mul_(0.5)
            return super().kick(s, c, g, scale)

    class KeepsUpdate(GradientDescent):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return s.replace(x=s.x + s.u)

    class KickAssigns(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            s.x = s.x + g
            return super().kick(s, c, g, scale)

    class DriftAssigns(Nesterov):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            s.v = 2 * s.v  # type: ignore[misc]
            return super().drift(s, c, scale)

    class DriftTakesOut(GradientDescent):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return s.replace(x=s.x + s.streams.pop("u"))

    class Shrinks(Nesterov):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return super().drift(s, c, scale).replace(v=s.v.mean(-1, keepdim=True))

    assert "stream 'v' with shape (4, 16, 32); it has (4, 16, 1)" in fault_in_building(Shrinks)
    assert "kick() assigns to x of the state that it is given" in fault_in_building(KickAssigns)
    assert "drift() assigns to v of the state that it is given" in fault_in_building(DriftAssigns)
    assert "drift() assigns to u of the state that it is given" in fault_in_building(DriftTakesOut)
    assert "kick() moves x" in fault_in_building(KickMovesX)
    assert "changes v in place" in fault_in_building(InPlace)
    assert "adds or loses: u" in fault_in_building(KeepsUpdate)


def test_what_a_rule_returns_is_checked() -> None:
    class NoKick(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            super().kick(s, c, g, scale)  # type: ignore[return-value]

    class Moved(GradientDescent):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return s.x + s.u  # type: ignore[return-value]

    class Narrow(GradientDescent):
        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            moved = super().drift(s, c, scale)
            return moved.replace(x=moved.x.mean(-1))

    class NoDefault(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float) -> sf.State:  # type: ignore[override]
            return super().kick(s, c, g, scale)

    assert fault_in_building(NoKick) == "NoKick.kick() returns None: is its return statement missing?"
    assert fault_in_building(Moved) == "Moved.drift() returns a Tensor; it should be a State."
    assert "Narrow.drift() leaves x in the shape (4, 16); it was (4, 16, 32)." in failures(one_off(Narrow)).values()
    assert 1 not in failures(one_off(NoDefault))


def test_an_exception_is_reported_once_with_its_place() -> None:
    class Typo(Nesterov):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return s.replace(v=c.betta * s.v + g)

    class Undeclared(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return s.replace(u=s.w + g)

    assert "this state has no stream 'w': declare it in `streams`" in failures(one_off(Undeclared))[1]
    broken = failures(one_off(Typo))
    assert "no coefficient 'betta'" in broken[1]
    assert "test_audit.py, line" in broken[1]
    assert broken[2] == "for the same reason"


def test_a_name_must_stand_for_what_is_audited() -> None:
    broken = failures(audit(sf.model_config("tmm"), "yurii", steps=30))
    assert broken == {1: "the name 'yurii' stands for another architecture"}


def test_zero_streams_and_free_coefficients() -> None:
    """What no shipped rule uses yet, a rule of your own may."""

    @sf.register_template("drag-test", equation="v' = LN_v(beta v + gamma g);  x' = x + v' + pull w',  w' = w + g")
    class Drag(Nesterov):
        streams = {**Nesterov.streams, "w": sf.Stream("zero", "sum of all answers")}
        coefficients = {**Nesterov.coefficients, "pull": sf.free(-0.1, "drift")}

        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return super().kick(s, c, g, scale).replace(w=s.w + scale * g)

        def drift(self, s: sf.State, c: sf.Values, scale: float = 1.0) -> sf.State:
            return s.replace(x=s.x + s.v + c.pull * s.w)

    result = audit(sf.model_config("drag-test"), "drag-test", steps=30)
    assert failures(result) == {}
    assert result.checks[0].detail.endswith("uncited")


def test_overrides_are_named_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "yurii", "hb", "splitting=strang", "--steps", "30", "--json"]) == 0
    names = [result["name"] for result in json.loads(capsys.readouterr().out)]
    assert names == ["verlet-ama", "heavy-ball x strang"]
    assert main(["audit", "yurii", "splitting=strang", "--all"]) == 2
    assert "--all audits the presets as they are" in capsys.readouterr().err


def test_a_wrong_transcription_fails() -> None:
    def wrong(model: sf.Model, ids: Tensor) -> Tensor | None:
        logits = transcribe(model, ids)
        return None if logits is None else (1 + 1e-6) * logits

    assert 6 in failures(audit(sf.model_config("yurii"), "yurii", steps=30, transcription=wrong))


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "yurii", "adam", "splitting=parallel", "--steps", "30", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in results] == ["nesterov-euler", "adam x parallel"]
    assert all(check["passed"] for r in results for check in r["checks"])
    assert main(["audit", "leak-shift", "--steps", "30"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "0 of 1 pass, 0 against a transcription (30 training steps, " in out
    assert " took " not in out
    for words, sentence in ((["audit"], "Which architecture"), (["audit", "yurii", "--steps", "3"], "too short")):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err


def test_training_steps_that_were_not_taken_are_not_told(capsys: pytest.CaptureFixture[str], registries: None) -> None:
    def kick(self: sf.Template, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
        return s.replace(u=s.w)

    sf.register_template("no-step")(type("NoStep", (GradientDescent,), {"kick": kick}))
    assert main(["audit", "no-step", "vanilla", "--steps", "30"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 pass, 1 against a transcription (30 training steps, no-step took 0 of them, " in said


def test_transcription_files(tmp_path: Path) -> None:
    assert load_transcription() is not None  # the checkout's own
    with pytest.raises(sf.InputError, match="no transcription file"):
        load_transcription(tmp_path / "none.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(sf.InputError, match="defines no function transcribe"):
        load_transcription(tmp_path / "empty.py")


@pytest.mark.parametrize(
    "settings",
    [
        # a floor that no row touches: zero gradients, listed
        pytest.param({"name": "entropy-floor", "target": "token"}, marks=pytest.mark.slow),
        # rows out of reach: finite differences are taken elsewhere, and it says so
        pytest.param({"name": "entropy", "ratio": 0.1}, marks=pytest.mark.slow),
        {"name": "vanilla", "document_separator": 50_256},  # an id beyond the audited vocabulary
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_what_acts_only_sometimes_passes(settings: dict[str, Any], steps: int) -> None:
    options = dict(settings)
    result = short_audit(sf.model_config(options.pop("name"), **options), steps=steps)
    assert failures(result) == {}
    if "ratio" in settings:
        assert "at ratio=0.999" in result.checks[-1].detail


def test_audit_of_a_name_prints_its_checks() -> None:
    found = sf.audit("vanilla", steps=30)
    lines = str(found).splitlines()
    assert found.passed
    assert found.name == "vanilla"
    assert lines[0] == "audit of vanilla"
    assert [line.split()[:2] for line in lines[1:]] == [["ok", title] for title in OBLIGATIONS.values()]


def test_a_first_look_is_taken_at_rules_of_others_alone() -> None:
    class Future(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return s.replace(u=scale * g.mean(1, keepdim=True).expand_as(g))

    class Past(GradientDescent):
        def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
            return s.replace(u=scale * g.cumsum(1))

    class Plain(GradientDescent):
        pass

    configs = [registered(rule) for rule in (Future, Past, Plain)]
    assert audit_module.first_look(configs[2].replace(splitting="parallel", qk_norm=True)) == ""  # another architecture
    looks = [audit_module.first_look(config) for config in configs]
    assert looks[0].startswith("it would not pass its audit, since 2 causal: tokens from 1 on change the logits before")
    assert "since 3 decoding: " in looks[1]
    assert looks[2] == ""
    assert audit_module.first_look(sf.model_config("yurii")) == ""
