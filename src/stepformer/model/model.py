"""The language model: what goes through the blocks, as written or by an engine, and what can be asked about it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stepformer.base.errors import InputError, suggestion
from stepformer.base.settings import checked
from stepformer.decoding.beams import generate
from stepformer.decoding.cache import Cache
from stepformer.model import engines
from stepformer.model.backbone import Backbone
from stepformer.model.roles import Role, named_roles
from stepformer.ops import kernels
from stepformer.ops.adapters import is_adapted
from stepformer.ops.cross_entropy import cross_entropy, linear_cross_entropy
from stepformer.ops.linear import rounded_weights
from stepformer.ops.sharding import whole
from stepformer.ops.tables import check_inputs
from stepformer.oracles import Call
from stepformer.rules import State, templates

Logits = TypeVar("Logits")
Loss = TypeVar("Loss")


class Output(NamedTuple, Generic[Logits, Loss]):
    """What a model gives; a type checker knows which of the two is a tensor by what the model was given."""

    logits: Logits  # (B, T, V); None with `loss_only`
    loss: Loss  # with targets, their mean cross-entropy in nats; else None


class How(TypedDict, total=False):
    """What every call of a model may be given (`Model.forward`)."""

    cache: Cache | None
    lengths: Tensor | None
    last_only: bool


@dataclass(frozen=True)
class Passage:
    """One layer at work: the state before and after it, and what happened inside."""

    layer: int
    before: State
    after: State
    point: Tensor | None  # what the attention's pre-norm receives, at its first call
    seen: dict[str, list[Tensor]]  # what the oracles report (`Model.observe`), a list over their calls
    call: Call


class Model(Backbone):
    """A decoder-only language model whose layers are steps of the optimizer that its config names.

    `model(tokens)` gives `.logits`; `model(tokens, targets)` also `.loss` (targets already shifted, -100 ignored).
    Training asks for the loss alone, `model(tokens, targets, loss_only=True)`: on a GPU it needs no whole logits then.

    Args:
        config: What it is; `stepformer.build` makes both from a name.
        seed: Of the initial weights.
        device: Where the weights are.
        dtype: Of the weights.
    """

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        last_only: bool = False,
        loss_only: bool = False,
    ) -> Output[Any, Any]:
        """Logits for tokens (B, T), and the loss when targets are given.

        Args:
            tokens: Ids (B, T), at most as many as the context in a row.
            targets: Ids (B, T) that should follow them; -100 is ignored.
            cache: What `new_cache` made: the tokens continue what it holds, and no gradients are recorded.
            lengths: (B,), how many of each row's tokens are real when prompts are padded on the right.
            last_only: Return the logits of each row's last real token alone, (B, 1, V).
            loss_only: Return the loss alone, for which a GPU never holds the logits of all tokens. That loss has first
                derivatives only (`ops.off`).
        """
        longest = self.config.context if cache is None else math.inf  # a cache knows its own capacity
        check_inputs(tokens, targets, lengths, vocab_size=self.config.vocab_size, context=longest)
        if targets is not None and last_only:
            raise InputError("`last_only` gives the logits of one token a row; it cannot be combined with targets.")
        if not isinstance(cache, Cache | None):
            raise InputError(f"`cache` is what new_cache() made, not {type(cache).__name__}.")
        if cache is not None and [len(layer) for layer in cache.slots] != self.attention_calls():
            raise InputError("This cache was made for another architecture: make it with this model's new_cache().")
        if loss_only and targets is None:
            raise InputError("`loss_only` needs targets: without them there is no loss.")
        targets = None if targets is None else targets.long()
        with torch.no_grad() if cache is not None else contextlib.nullcontext():
            h = self._last_states(tokens.long(), cache, lengths, last_only)
            if loss_only and targets is not None:
                return Output(None, self._loss(h, targets))
            logits = self.logits_of(h)
            return Output(logits, None if targets is None else cross_entropy(logits, targets))

    if TYPE_CHECKING:  # a call of nn.Module may be given and give anything

        @overload
        def __call__(self, tokens: Tensor, targets: None = None, **how: Unpack[How]) -> Output[Tensor, None]: ...
        @overload
        def __call__(
            self, tokens: Tensor, targets: Tensor, *, loss_only: Literal[False] = False, **how: Unpack[How]
        ) -> Output[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, tokens: Tensor, targets: Tensor, *, loss_only: Literal[True], **how: Unpack[How]
        ) -> Output[None, Tensor]: ...
        @overload
        def __call__(
            self, tokens: Tensor, targets: Tensor | None, *, loss_only: bool = False, **how: Unpack[How]
        ) -> Output[Any, Any]: ...
        def __call__(self, *given: Any, **how: Any) -> Any: ...

    def _last_states(self, tokens: Tensor, cache: Cache | None, lengths: Tensor | None, last_only: bool) -> Tensor:
        """The normalised x after the last layer, of all tokens or of each row's last one."""
        if torch.compiler.is_compiling() and tokens.is_cuda:
            kernels.compiler_prepared(self.config.d_model <= 128)
        call = self.call_of(tokens, lengths, cache)
        s = self.start(tokens, call.positions, from_zero=cache is None)
        checkpointing = self.config.activation_checkpointing and self.training and torch.is_grad_enabled()
        engine = None if checkpointing else engines.training(self, s, call)
        with contextlib.nullcontext() if checkpointing else rounded_weights(self.blocks, self.shared):
            if engine is not None:
                h = engine.run(self, s, call, cache)
            else:
                h = self._as_written(s, call, cache, checkpointing).x
        if cache is not None:
            cache.advance(call, tokens.shape[1])
        if last_only:
            h = h[:, -1:] if lengths is None else h[torch.arange(len(h), device=h.device), lengths - 1][:, None]
        return h if engine is not None else self.final_norm(h)

    def _as_written(self, s: State, call: Call, cache: Cache | None, checkpointing: bool) -> State:
        # no layer draws random numbers, but an adapter's dropout does
        draws = checkpointing and any(map(is_adapted, self.modules()))
        for i, block in enumerate(self.blocks):
            call = call if cache is None else replace(call, slots=cache.slots[i])
            plain = i in self.plain_layers
            if checkpointing:
                s = checkpoint(block, s, call, plain, use_reentrant=False, preserve_rng_state=draws)
            else:
                s = block(s, call, plain)
        return s

    def _loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """The loss from the normalised last x; where kernels may run, from some rows of logits at a time."""
        changing = [part for part in self.parts if part.changes("logits")]
        caps = [part.cap for part in changing]
        if len(caps) <= 1 and None not in caps:
            loss = linear_cross_entropy(h, self.table(), targets, caps[0] if caps else None)
            if loss is not None:
                return loss
        return cross_entropy(self.logits_of(h), targets)

    @torch.no_grad()
    def passages(self, tokens: Tensor, *, rows: bool = False) -> Iterator[Passage]:
        """Look at tokens (B, T) before and after each layer, as written, without gradients; `rows` as in `observe`."""
        check_inputs(tokens, None, None, vocab_size=self.config.vocab_size, context=self.config.context)
        call = self.call_of(tokens.long())
        s = self.start(tokens.long(), call.positions)
        for i, block in enumerate(self.blocks):
            seen: dict[str, list[Tensor]] = {}
            points: list[Tensor] = []

            def note(name: str, value: Tensor, seen: dict[str, list[Tensor]] = seen) -> None:
                seen.setdefault(name, []).append(value)

            handle = block.attn_norm.register_forward_pre_hook(
                lambda _, inputs, points=points: points.append(inputs[0])
            )
            try:
                after = block(s, replace(call, observe=note, rows=rows), i in self.plain_layers)
            finally:
                handle.remove()
            yield Passage(i, s, after, points[0] if points else None, seen, call)
            s = after

    def observe(self, tokens: Tensor, *, rows: bool = True) -> list[dict[str, list[Tensor]]]:
        """What the oracles report about themselves on tokens (B, T): one dictionary per layer, in order of the calls.

        Constrained attention reports `capped_rows`, the share of rows whose target is out of reach, and its inverse
        temperatures `beta` (B, H, T); Hamiltonian attention `bounded_scores`, the share of scores beyond their bound.
        With `rows`, attentions also report the `entropy` of every row of weights in nats and the `energy` of every
        row, both (B, H, T) (docs/inside-the-network.md); linear attention has an energy of one head and no entropy.
        """
        return [passage.seen for passage in self.passages(tokens, rows=rows)]

    def roles(self) -> dict[str, Role]:
        """The declared role of every parameter."""
        return {name: role for name, _, role in named_roles(self)}

    def unused_parameters(self) -> list[str]:
        """Parameters that never reach the logits by construction; counted, but not trained."""
        return [f"blocks.{i}.{name}" for i, block in enumerate(self.blocks) for name in sorted(block.unused)]

    def num_parameters(self, convention: Literal["total", "non-positional", "non-embedding"] = "total") -> int:
        """Parameters: all ("total"), without position tables ("non-positional"), or without token tables, too."""
        tables = {"total": (), "non-positional": ("pos_emb",), "non-embedding": ("pos_emb", "tok_emb")}
        if convention not in tables:
            raise InputError(
                f"Unknown counting convention '{convention}': use 'total', 'non-positional' or 'non-embedding'."
            )
        return sum(p.numel() for n, p in self.named_parameters() if not any(f"{w}." in n for w in tables[convention]))

    def coefficients(self) -> list[dict[str, float]]:
        """Current values of the learned coefficients, one dictionary per layer; `r[3]` is that of head 3.

        One that a layer has and never reads is not among them. Of a model that is spread over ranks, all must ask
        together.
        """
        layers = []
        for i, block in enumerate(self.blocks):
            idle = {name.rpartition(".")[2] for name in block.unused}
            banks = [bank for bank in block.banks() if bank is not block.coefficients or i not in self.plain_layers]
            layers.append({key: value for bank in banks for key, value in bank.named_values(idle).items()})
        return layers

    def gains(self) -> list[dict[str, float]]:
        """Root mean square of every norm's gain, one dictionary per layer; of a spread model all ranks ask."""
        layers = []
        for block in self.blocks:
            gains = {n: p for n, p, role in named_roles(block) if role is Role.NORM and n.endswith(".weight")}
            rms = {n: whole(p.detach()).double().square().mean().sqrt() for n, p in gains.items()}
            layers.append({name.removesuffix(".weight"): float(value) for name, value in rms.items()})
        return layers

    def stream_norms(self, tokens: Tensor) -> list[dict[str, float]]:
        """Root mean square of x and of every stream after each layer, on tokens (B, T)."""
        after = [{"x": passage.after.x, **passage.after.streams} for passage in self.passages(tokens)]
        return [{name: float(t.double().square().mean().sqrt()) for name, t in streams.items()} for streams in after]

    def _known_layers(self, asked: Iterable[int]) -> frozenset[int]:
        numbers = frozenset(asked)
        if any(not 0 <= i < self.config.n_layer for i in numbers):
            raise InputError(f"Layers are numbered 0 to {self.config.n_layer - 1}; {sorted(numbers)} was asked for.")
        return numbers

    def pin_coefficients(self, layer: int | None = None, **values: float | Tensor) -> None:
        """Fix coefficients at other values than the learned ones: `pin_coefficients(mu=0.0)`, `(layer=3, nu_attn=0.5)`.

        For tests and ablations, also at values that learning never reaches, such as mu = 0 or 2. Pins are not part of
        the state dict; `unpin_coefficients` returns to the learned values.
        """
        asked = range(len(self.blocks)) if layer is None else [checked("layer", layer, int)]
        blocks = [self.blocks[i] for i in self._known_layers(asked)]
        for word, value in values.items():
            if not sum(bank.pin(word, value) for block in blocks for bank in block.banks()):
                known = [name for bank in blocks[0].banks() for name in bank.names()]
                raise InputError(f"There is no coefficient '{word}' here.{suggestion(word, known)}")

    def unpin_coefficients(self) -> None:
        """Return to the learned values."""
        for block in self.blocks:
            for bank in block.banks():
                bank.pinned.clear()

    plan = engines.fused.plan
    recorded_steps = engines.decoding
    generate = generate
    """Continue prompts: [`generate`][stepformer.decoding.beams.generate] of this model."""

    def hybrid(self, *, layers: Collection[int] | None = None, cutoff: int | None = None) -> Model:
        """The same weights with momentum in some layers only, the others as plain residual blocks.

        The velocity passes through plain layers unchanged. For checkpoints trained with a velocity template under
        Lie-Trotter (heavy ball, Nesterov, triple momentum). The result shares parameters (and the state dict) with
        this model.

        Args:
            layers: The numbers of the momentum layers.
            cutoff: Instead of them: layers below this number have momentum.
        """
        config = self.config
        if config.splitting != "lie-trotter" or not templates[config.template].component.has_velocity():
            raise InputError(
                "Hybrid inference replaces Lie-Trotter momentum blocks by plain ones, so it needs a velocity, a stream "
                f"called 'v'; this model has template '{config.template}' and splitting '{config.splitting}'."
            )
        if (layers is None) == (cutoff is None):
            raise InputError("Give either `layers` (a set of layer numbers) or `cutoff` (a layer number).")
        asked = checked("layers", layers, Collection) if cutoff is None else range(checked("cutoff", cutoff, int))
        if cutoff is not None and not 0 <= cutoff <= config.n_layer:
            raise InputError(f"cutoff = {cutoff} should lie between 0 and {config.n_layer}, the number of layers.")
        momentum = self._known_layers(checked("layers", i, int) for i in asked or ())
        twin = copy.copy(self)  # shares modules and parameters; only the choice of layers is its own
        twin._modules = dict(self._modules)
        twin.plain_layers = frozenset(range(config.n_layer)) - momentum
        return twin
