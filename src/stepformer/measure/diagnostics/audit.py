"""The conformance audit: what every architecture owes, checked on a small copy of it.

1. it builds from its name and from an explicit config, states its equation and its references, and keeps the contract
   of a template: a kick leaves x alone, no rule changes its input, a layer hands on exactly the declared streams;
2. it is causal: changing later tokens leaves earlier logits unchanged to the bit, a longer context changes nothing
   before it, and rows of a batch do not see each other;
3. cached decoding equals the full forward pass;
4. trained on fresh uniform random tokens it does not fall below ln V: what cannot be predicted must not be;
5. its gradients are finite at step 0 and reach every parameter that is not declared unused; away from the start
   none of them is zero;
6. its gradients equal finite differences, and its values and gradients equal a plain transcription of its
   equations where there is one.

Checks 2, 3 and 6 run on shaken weights (noise added to every parameter), so that a fault cannot hide behind a
parameter that starts at zero or a norm that starts at one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from stepformer.base.arguments import checks
from stepformer.base.errors import ConfigError, InputError, StepformerError, given
from stepformer.base.plugins import explained, is_ours
from stepformer.catalogue import model_config, preset_of
from stepformer.measure.diagnostics.second_versions import Transcription
from stepformer.model import Model
from stepformer.model.config import ModelConfig
from stepformer.model.roles import Role
from stepformer.oracles import attentions, fresh_call, mlps
from stepformer.rules import State, splittings, templates

GEOMETRY = {"n_layer": 2, "n_head": 8, "d_model": 32, "context": 16, "vocab_size": 16}
IGNORED = ("size", *GEOMETRY, "real_vocab", "mlp_hidden")  # keys of [model]: the audited copy has its own

# fp64 carries about 16 digits; kernels may sum in another order when shapes change, and two layers amplify that.
CACHE_TOLERANCE = 1e-10
# Central differences with h = 1e-5 in fp64: truncation and rounding are each below 1e-9 of the largest derivative.
DIFFERENCE_TOLERANCE = 1e-6
# Two fp64 evaluations of one formula in different order, relative to the largest entry.
TRANSCRIPTION_TOLERANCE = 1e-9
# The catalogue's allowance for the noise of a mean over 100 steps.
BELOW_CHANCE = 0.02

AGAIN = "for the same reason"
NOISE = "noise, or something kept from an earlier call"
OTHER_DRIFT = "splitting '{}' lets x follow v and never calls drift(), which in this rule does something else"
OBLIGATIONS = {1: "builds", 2: "causal", 3: "decoding", 4: "chance", 5: "gradients", 6: "equations"}


@dataclass(frozen=True)
class Check:
    """One obligation, kept or broken, with the number that shows it."""

    obligation: int
    passed: bool
    detail: str


@dataclass(frozen=True)
class Audit:
    """All checks of one architecture."""

    name: str
    checks: tuple[Check, ...]
    steps: int  # of training that were taken: fewer than asked for if it failed before or while it trained

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{'ok' if c.passed else 'FAILED':7}{OBLIGATIONS[c.obligation]:12}{c.detail}" for c in self.checks]
        return "\n".join([f"audit of {self.name}", *lines])


@checks(steps=30)
def audit(
    config: ModelConfig | str,
    name: str = "",
    *,
    steps: int = 300,
    seed: int = 0,
    transcription: Transcription | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Audit:
    """Audit an architecture at d = 32 with 8 heads, two layers, V = T = 16, whatever its own size.

    Args:
        config: The architecture, or the name of a preset or template.
        name: What it is called in the answer.
        steps: Training steps on random tokens, of the check that it does not read ahead.
        seed: Of weights and tokens.
        transcription: Its equations written again, to compare with (docs/audit.md); the command takes a checkout's.
        progress: Called with the name of each check.

    Examples:
        >>> import stepformer as sf
        >>> sf.audit("yurii", steps=30).passed
        True
    """
    if isinstance(config, str):
        name, config = name or config, model_config(config)
    if not isinstance(config, ModelConfig):
        raise InputError(
            f"`audit` takes a name or a ModelConfig, not {type(config).__name__}: of a model, model.config."
        )
    audited = _Audited(small_copy(config), name, steps, seed, transcription)
    checks: list[Check] = []
    for obligation, title in OBLIGATIONS.items():
        progress(title)
        try:
            passed, detail = True, getattr(audited, title)()
        except Exception as error:  # a user's rule may fail in any way; the audit reports it and goes on
            passed, detail = False, explained(error)
        if not passed and any(detail == check.detail for check in checks):
            detail = AGAIN
        checks.append(Check(obligation, passed, detail))
    return Audit(name or config.template, tuple(checks), len(audited.losses))


def first_look(config: ModelConfig) -> str:
    """What the checks that take no training find wrong with rules that are not the package's, for who trains with them
    and has not asked for an audit; empty if nothing."""
    if all(map(is_ours, config.components().values())):
        return ""
    audited = _Audited(small_copy(config), "", 0, 0, None)
    for obligation in (1, 2, 3):
        try:
            getattr(audited, OBLIGATIONS[obligation])()
        except Exception as error:  # a user's rule may fail in any way
            found = f"{obligation} {OBLIGATIONS[obligation]}: {explained(error)}".rstrip(".")
            return f"it would not pass its audit, since {found} (`stepformer audit` says more)"
    return ""


def small_copy(config: ModelConfig) -> ModelConfig:
    """The architecture at the size at which it is audited."""
    separator = None if config.document_separator is None else min(config.document_separator, 3)
    dense = {key: min(config.get(key), GEOMETRY["n_layer"]) for key in ("dilation", "period")}
    return config.replace(**GEOMETRY, **dense, real_vocab=None, mlp_hidden=None, document_separator=separator)


def shaken(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> Model:
    """A model whose every parameter has been moved off its initial value."""
    model = Model(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return model.eval()


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; NaN stays NaN and fails every comparison."""
    return (a - b).abs().max().item()


def _largest(values: Iterable[float]) -> float:
    """The maximum, or NaN if there is one (Python's max would drop it)."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def _backward(model: Model, tokens: Tensor) -> float:
    """Add the gradients of the loss, and return it."""
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    return loss.item()


def _owed(kept: bool, otherwise: str) -> None:
    if not kept:
        raise StepformerError(otherwise)


@contextlib.contextmanager
def _kept(s: State, who: str, method: str, **beside: Tensor) -> Iterator[None]:
    """A sentence if a method changes a tensor of the state that it is handed, or gives it something else to hold."""
    held = {**s.streams, **vars(s)}
    before = {key: (t, t._version) for key, t in {"x": s.x, **s.streams, **s.memory, **beside}.items()}
    yield
    now = {**s.streams, **vars(s)}
    assigned = ", ".join(key for key in {**held, **now} if held.get(key) is not now.get(key))
    _owed(not assigned, f"{method}() assigns to {assigned} of the state that it is given; it must return a new one")
    changed = ", ".join(key for key, (t, version) in before.items() if t._version != version)
    _owed(not changed, f"the {who} changes {changed} in place; it must return new tensors")


@dataclass(frozen=True)
class _Audited:
    """A small architecture. A method for each obligation: the number that shows it is kept, or an exception."""

    config: ModelConfig
    name: str
    steps: int
    seed: int
    transcription: Transcription | None
    losses: list[float] = field(default_factory=list)  # of the training steps that were taken

    @property
    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(self.config.vocab_size, (4, self.config.context), generator=generator)

    def builds(self) -> str:
        config, template = self.config, templates[self.config.template]
        with contextlib.suppress(ConfigError):  # a combination may have a title that is not a name
            same = small_copy(model_config(self.name)) == config
            _owed(same, f"the name '{self.name}' stands for another architecture")
        again = ModelConfig.from_dict(config.to_dict())
        survives = f"the config does not survive a round trip: {again.to_dict()} is not {config.to_dict()}"
        _owed(again == config, survives)
        _owed(bool(template.equation), f"template '{config.template}' states no equation")
        model, call = shaken(config, self.seed), fresh_call(self.tokens)
        s, block = model.start(self.tokens, call.positions), model.blocks[0]
        for turn, values in block.values().items():
            if turn == "out" or (block.template.integrates and turn == "attn"):
                continue  # a read-out has no answer, and the integrator takes this turn as a whole
            g = torch.randn(s.x.shape, generator=torch.Generator().manual_seed(self.seed), dtype=s.x.dtype)
            rule = block.template
            with _kept(s, "rule", "kick", g=g):
                kicked = given(rule.kick(s, values, g, 1.0), rule, "kick", State)
            _owed(kicked.x is s.x, f"kick() moves x (turn '{turn}'); only drift() may")
            norm = block.aux_norms[block.norm_keys[turn]] if turn in block.norm_keys else torch.nn.Identity()
            kicked = rule.normalise(kicked, norm)
            with _kept(kicked, "rule", "drift"):
                moved = given(rule.drift(kicked, values, 1.0), rule, "drift", State)
            if splittings[config.splitting].component.own_drift:
                _owed(_is_multiple(moved.x - kicked.x, kicked.v), OTHER_DRIFT.format(config.splitting))
        for part in block.parts:
            for method in ("enter", "leave"):
                handed = State(s.x, dict(s.streams), dict(s.memory))
                with _kept(handed, f"extra '{part.name}'", method):
                    given(getattr(part, method)(handed, block.extras.values()["block"]), part, method, State)
        later = {name for name, stream in block.template.streams.items() if stream.start == "later"}
        streams = block(s, call).streams
        odd = ", ".join(sorted((set(streams) ^ set(s.streams)) - later))
        _owed(not odd, f"a layer should hand on the streams {sorted(s.streams)}; it adds or loses: {odd}")
        for key, stream in streams.items():
            due, shape = tuple(s.streams.get(key, s.x).shape), tuple(stream.shape)
            _owed(shape == due, f"a layer should hand on stream '{key}' with shape {due}; it has {shape}")
        counts = [model.num_parameters(convention) for convention in ("total", "non-positional", "non-embedding")]
        in_order = counts[0] > counts[1] >= counts[2] > 0 or config.positions != "learned"
        _owed(in_order, f"the three parameter counts are not in order: {counts}")
        row = preset_of(config)
        cited = template.cite or (row is not None and row.cite)
        return f"{counts[0]:,}{'' if cited else ', uncited'}"

    @torch.no_grad()
    def causal(self) -> str:
        tokens, cuts = self.tokens, range(1, self.config.context)
        model = shaken(self.config, self.seed)
        logits = model(tokens).logits
        _owed(bool(logits.isfinite().all()), "the logits are not finite")
        again = _difference(model(tokens).logits, logits)
        _owed(again <= CACHE_TOLERANCE, f"the same tokens again give logits that differ by {again:.1e}: {NOISE}")
        alone = _difference(model(tokens[1:2]).logits, logits[1:2])  # first: later tokens of other rows count as well
        _owed(alone <= CACHE_TOLERANCE, f"a row's logits depend on the other rows of its batch, by {alone:.1e}")
        # All cuts in one pass. The unchanged rows stand at the same places of as large a batch, where kernels sum in
        # the same order: to the bit.
        same = tokens.repeat(len(cuts), 1, 1)
        later = torch.arange(self.config.context) >= torch.tensor(cuts)[:, None, None]
        other = torch.where(later, (same + 1) % self.config.vocab_size, same)
        for dtype in (torch.float32, torch.float64):
            model = shaken(self.config, self.seed, dtype)
            before, after = (model(rows.flatten(0, 1)).logits.unflatten(0, same.shape[:2]) for rows in (same, other))
            _owed(bool(before.isfinite().all()), "the logits are not finite")
            for i, cut in enumerate(cuts):
                changed = _difference(after[i, :, :cut], before[i, :, :cut])
                _owed(changed == 0, f"tokens from {cut} on change the logits before them by {changed:.1e}")
        worst = _largest(_difference(model(tokens[:, :cut]).logits, logits[:, :cut]) for cut in cuts)
        _owed(worst <= CACHE_TOLERANCE, f"extending the context changes earlier logits by {worst:.1e}")
        return f"bit-equal, {worst:.0e}"

    @torch.no_grad()
    def decoding(self) -> str:
        model, tokens, time = shaken(self.config, self.seed), self.tokens[:3], self.config.context
        full = model(tokens).logits
        differences = []
        for chunks in ([1] * time, [time // 2] + [1] * (time - time // 2), [3, 4, time - 7]):
            cache = model.new_cache(len(tokens))
            parts = [model(part, cache=cache).logits for part in tokens.split(chunks, dim=1)]
            differences.append(_difference(torch.cat(parts, dim=1), full))
        # prompts of different length, padded on the right with arbitrary tokens, then decoded together
        lengths, longest = torch.tensor([2, 7, 5]), 7
        cache = model.new_cache(len(tokens))
        prompt = tokens[:, :longest].masked_fill(torch.arange(longest) >= lengths[:, None], 0)
        logits = model(prompt, cache=cache, lengths=lengths, last_only=True).logits
        rows = torch.arange(len(tokens))
        differences.append(_difference(logits[:, 0], full[rows, lengths - 1]))
        for at in (lengths + step for step in range(time - longest)):
            logits = model(tokens[rows, at][:, None], cache=cache).logits
            differences.append(_difference(logits[:, 0], full[rows, at]))
        worst = _largest(differences)
        _owed(worst <= CACHE_TOLERANCE, f"cached logits differ by {worst:.1e}")
        return f"{worst:.0e}"

    def chance(self) -> str:
        model = Model(self.config, seed=self.seed).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        generator = torch.Generator().manual_seed(self.seed + 2)
        losses = self.losses
        for _ in range(self.steps):
            optimizer.zero_grad()
            tokens = torch.randint(self.config.vocab_size, (32, self.config.context + 1), generator=generator)
            losses.append(_backward(model, tokens))
            optimizer.step()
            _owed(math.isfinite(losses[-1]), f"the loss is not finite after {len(losses)} training steps")
        chance = math.log(self.config.vocab_size)
        tail = losses[-min(100, max(1, self.steps // 3)) :]
        mean = sum(tail) / len(tail)
        below = f"loss {mean:.3f} on unpredictable tokens, below ln V = {chance:.3f}"
        _owed(mean >= chance - BELOW_CHANCE, below)
        return f"{mean:.3f}"

    def gradients(self) -> str:
        model = Model(self.config, seed=self.seed)
        _backward(model, self.tokens)
        zeros, without = [], list[str]()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                without.append(name)
                continue
            _owed(bool(parameter.grad.isfinite().all()), f"the gradient of {name} is not finite")
            if not bool(parameter.grad.any()):
                zeros.append(name.replace("blocks.", "").replace("coefficients.", ""))
        if without:
            also = f" (nor do {', '.join(without[1:5])}{', ...' * (len(without) > 5)})" if without[1:] else ""
            raise StepformerError(f"{without[0]} receives no gradient{also} and is not declared unused (docs/audit.md)")
        moved = shaken(_with(self.config, "all_active"), self.seed)
        _backward(moved, self.tokens)
        starved = [n for n, p in moved.named_parameters() if p.grad is not None and not bool(p.grad.any())]
        # With zero streams the first look-ahead and memory multiply zero, whatever their value.
        starved = [n for n in starved if moved.roles()[n] is not Role.COEFFICIENT]
        some = f"{', '.join(starved[:4])}{' ...' if starved[4:] else ''}"
        _owed(not starved, f"the gradient is zero everywhere for {some}")
        unused = len(model.unused_parameters())
        notes = [f"{unused} unused"] if unused else []
        notes += [f"gradient 0: {', '.join(zeros)}"] if zeros else []
        return "; ".join(notes) or "all"

    def equations(self) -> str:
        exact, where = _with(self.config, "exact_gradient"), ""
        worst = self._against_differences(exact)
        active = _with(exact, "all_active")
        if not worst <= DIFFERENCE_TOLERANCE and active != exact:
            # parts held constant on purpose, such as rows out of reach: compare where there are none, and say so
            worst = self._against_differences(active)
            changed = {k: v for k, v in active.options.items() if exact.options.get(k) != v}
            where = " at " + ", ".join(f"{key}={value}" for key, value in changed.items())
        apart = f"gradients differ from finite differences by {worst:.1e} of the largest{where}"
        _owed(worst <= DIFFERENCE_TOLERANCE, apart)
        model, inputs, targets = shaken(self.config, self.seed), self.tokens[:, :-1], self.tokens[:, 1:]
        independent = self.transcription(model, inputs) if self.transcription else None
        if independent is None:
            return f"fd {worst:.0e}{where}, {'not transcribed' if self.transcription else 'no transcription'}"
        ours, largest = _gradients(model, self.tokens)
        errors = [_difference(independent, model(inputs).logits) / independent.abs().max().item()]
        other = torch.nn.functional.cross_entropy(independent.flatten(0, 1), targets.flatten())
        used = [p for p in model.parameters() if p.grad is not None]
        theirs = torch.autograd.grad(other, used, allow_unused=True)
        for (name, own), gradient in zip(ours.items(), theirs, strict=True):
            # where neither uses it there is nothing to compare: a floor that no row touches
            _owed(gradient is not None or not bool(own.any()), f"the transcription does not use {name}")
            errors += [] if gradient is None else [_difference(gradient, own) / largest]
        farthest = _largest(errors)
        apart = f"values or gradients differ from the transcribed equations by {farthest:.1e} of the largest"
        _owed(farthest <= TRANSCRIPTION_TOLERANCE, apart)
        return f"fd {worst:.0e}{where}, tr {farthest:.0e}"

    def _against_differences(self, config: ModelConfig) -> float:
        """Largest disagreement of gradients with central differences along random directions, of the largest."""
        model, tokens = shaken(config, self.seed), self.tokens
        gradients, largest = _gradients(model, tokens)
        generator = torch.Generator().manual_seed(self.seed + 3)
        errors, step = [], 1e-5
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameter = model.get_parameter(name)
                direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                direction /= direction.norm()
                values = []
                for sign in (1.0, -2.0):
                    parameter.add_(direction, alpha=sign * step)
                    values.append(model(tokens[:, :-1], tokens[:, 1:]).loss)
                parameter.add_(direction, alpha=step)
                measured = (values[0] - values[1]) / (2 * step)
                errors.append(_difference(measured, (gradient * direction).sum()) / largest)
        return _largest(errors)


def _is_multiple(move: Tensor, velocity: Tensor) -> bool:
    """Up to rounding in fp64."""
    move, velocity = move.flatten(), velocity.flatten()
    rest = move - (move @ velocity) / (velocity @ velocity) * velocity
    return bool(rest.norm() <= 1e-9 * move.norm())


def _with(config: ModelConfig, which: Literal["exact_gradient", "all_active"]) -> ModelConfig:
    """The same architecture under options that its components name for the audit."""
    chosen = (templates[config.template], splittings[config.splitting], attentions[config.attention], mlps[config.mlp])
    return config.replace(**{k: v for entry in chosen for k, v in getattr(entry.component, which).items()})


def _gradients(model: Model, tokens: Tensor) -> tuple[dict[str, Tensor], float]:
    """The gradients by parameter, and the largest norm among them."""
    _backward(model, tokens)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, max(g.norm().item() for g in gradients.values())
