"""The language model: embeddings, blocks, tied head."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.model.block import Block
from stepformer.model.config import ModelConfig
from stepformer.model.engines.fused import Moving, same_norms
from stepformer.model.engines.fused_hamiltonian import alike, weights_of
from stepformer.model.roles import Role, named_roles
from stepformer.ops import kernels
from stepformer.ops.adapters import is_adapted, weight_of
from stepformer.ops.sharding import is_sharded, whole
from stepformer.oracles import Cache, Call, fresh_call, make_norm
from stepformer.oracles.maps import rounded_maps
from stepformer.rules import State, templates

if TYPE_CHECKING:
    from stepformer.decoding.sampling import Generation, Prompts
    from stepformer.ops.embedding import Order

INIT_STD = 0.02
IGNORE = -100  # target id that the loss skips


class Output(NamedTuple):
    """Logits (B, T, V), or None with `loss_only`; and, with targets, their mean cross-entropy in nats."""

    logits: Tensor | None
    loss: Tensor | None = None


class Tables(nn.Module):
    """A token table and, with learned positions, a position table; their sum starts a stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.d_model)
        self.pos_emb = nn.Embedding(config.context, config.d_model) if config.positions == "learned" else None

    def forward(
        self, tokens: Tensor, positions: Tensor, order: Order | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """With an `order` of the tokens one kernel does it, for positions 0, 1, ..., and gives `dtype`."""
        if order is not None:
            from stepformer.ops.embedding import embed

            table = self.tok_emb.weight
            learned = None if self.pos_emb is None else self.pos_emb.weight
            return embed(tokens, table, learned, order, table.dtype if dtype is None else dtype)
        x = self.tok_emb(tokens)
        return x if self.pos_emb is None else x + self.pos_emb(positions)


class Blocks(nn.ModuleList):
    """A ModuleList whose items are known to be blocks."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...

        def __getitem__(self, index: int) -> Block: ...  # type: ignore[override]


class Model(nn.Module):
    """A decoder-only language model whose layers are steps of the optimizer that its config names.

    `model(tokens)` gives `.logits`; `model(tokens, targets)` also `.loss` (targets already shifted, -100 ignored).
    Training asks for the loss alone, `model(tokens, targets, loss_only=True)`: on a GPU it needs no whole logits then.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.plain_layers: frozenset[int] = frozenset()
        # under autocast: what x and the streams that start from tables are carried in; None: as the weights
        self.stream_dtype: torch.dtype | None = None
        with torch.device("meta"):  # allocated and drawn once, in reset_parameters
            self.embed = Tables(config)
            blocks = Blocks(Block(config, layer=i) for i in range(config.n_layer))
            self.starts = {name: stream.start for name, stream in blocks[0].template.streams.items()}
            tabled = [name for name, start in self.starts.items() if start == "embed" and config.aux_init == "embed"]
            self.aux_embed = nn.ModuleDict({name: Tables(config) for name in tabled})
            self.blocks = blocks
            self.final_norm = make_norm(config.norm, config.d_model, eps=config.norm_eps, bias=config.bias)
        target = torch.get_default_device() if device is None else torch.device(device)
        if target.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device = '{target}' was asked for, but this torch sees no CUDA device.")
        if target.type != "meta":
            self.to_empty(device=target)
            if dtype is not None:
                self.to(dtype)
            self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the initial weights: N(0, 0.02^2), output maps of the oracles with std 0.02 / sqrt(2 L).

        Every parameter has its own random stream, keyed by seed and name. So two architectures built from one seed
        agree on all parameters they share, whatever else they have. Without a seed one is drawn from torch's
        global generator. Afterwards every module that has a method `initialise` sets what starts otherwise.
        """
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        elif isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed = {seed!r} should be an integer.")
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # memory fresh from to_empty; whatever is forgotten below shows
        deep = {
            f"blocks.{i}.{oracle}.{getattr(block, oracle).output_map}.weight"
            for i, block in enumerate(self.blocks)
            for oracle in ("attn", "mlp")
            if getattr(block, oracle).output_map is not None
        }
        for name, parameter, role in named_roles(self):
            if role is Role.NORM:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif role is not Role.COEFFICIENT:
                std = INIT_STD / math.sqrt(2 * self.config.n_layer) if name in deep else INIT_STD
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                draw = torch.empty(parameter.shape, dtype=dtype, device="cpu").normal_(0.0, std, generator=generator)
                parameter.copy_(draw)
        for module in self.modules():
            initialise: Callable[[], None] | None = getattr(module, "initialise", None)
            if initialise is not None:
                initialise()
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise StepformerError(f"'{name}' has no initial value: its module should set it in `initialise`.")

    def roles(self) -> dict[str, Role]:
        """The declared role of every parameter."""
        return {name: role for name, _, role in named_roles(self)}

    def unused_parameters(self) -> list[str]:
        """Parameters that never reach the logits by construction; counted, but not trained."""
        return [f"blocks.{i}.{name}" for i, block in enumerate(self.blocks) for name in sorted(block.unused)]

    def num_parameters(self, convention: Literal["total", "non-positional", "non-embedding"] = "total") -> int:
        """Parameter count: all; without position tables; or without any token or position table."""
        if convention not in ("total", "non-positional", "non-embedding"):
            raise InputError(
                f"Unknown counting convention '{convention}': use 'total', 'non-positional' or 'non-embedding'."
            )
        left_out = {"total": (), "non-positional": ("pos_emb",), "non-embedding": ("pos_emb", "tok_emb")}[convention]
        return sum(p.numel() for n, p in self.named_parameters() if not any(f"{w}." in n for w in left_out))

    def coefficients(self) -> list[dict[str, float]]:
        """Current values of the learned coefficients, one dictionary per layer; `r[3]` is that of head 3.

        Of a model that is spread over ranks, all of them must ask together.
        """
        layers: list[dict[str, float]] = []
        for block in self.blocks:
            values: dict[str, float] = {}
            for bank in block.banks():
                for key, spec in bank.specs.items():
                    numbers = whole(bank.value(key).detach()).tolist()
                    names = [key] if spec.size == 1 else [f"{key}[{i}]" for i in range(spec.size)]
                    values.update(zip(names, numbers, strict=True))
            layers.append(values)
        return layers

    def gains(self) -> list[dict[str, float]]:
        """Root mean square of every norm's gain, one dictionary per layer; of a spread model all ranks ask."""
        layers = []
        for block in self.blocks:
            gains = {n: p for n, p, role in named_roles(block) if role is Role.NORM and n.endswith(".weight")}
            rms = {n: whole(p.detach()).double().square().mean().sqrt() for n, p in gains.items()}
            layers.append({name.removesuffix(".weight"): float(value) for name, value in rms.items()})
        return layers

    def pin_coefficients(self, layer: int | None = None, **values: float | Tensor) -> None:
        """Replace mapped coefficient values, e.g. `pin_coefficients(mu=0.0)` or `(layer=3, nu_attn=0.5)`.

        For tests and ablations: a sigmoid never reaches 0 or 1. Pins are not part of the state dict;
        `unpin_coefficients` returns to the learned values.
        """
        blocks = list(self.blocks) if layer is None else [self.blocks[layer]]
        for word, value in values.items():
            if not sum(bank.pin(word, value) for block in blocks for bank in block.banks()):
                known = [name for bank in blocks[0].banks() for name in bank.names()]
                raise InputError(f"There is no coefficient '{word}' here.{suggestion(word, known)}")

    def unpin_coefficients(self) -> None:
        for block in self.blocks:
            for bank in block.banks():
                bank.pinned.clear()

    def start(self, tokens: Tensor, positions: Tensor, *, from_zero: bool = False) -> State:
        """The state before the first layer: token embedding, and each auxiliary stream at its start.

        `from_zero` promises that the positions are 0, 1, ... in every row: a kernel counts for itself then.
        """
        order = self._token_order(tokens) if from_zero else None
        dtype = self._narrowed(tokens.device.type)

        def look_up(tables: nn.Module) -> Tensor:
            found: Tensor = tables(tokens, positions, order, dtype)
            return found if dtype is None else found.to(dtype)

        x = look_up(self.embed)
        streams = {}
        for name, start in self.starts.items():
            if start == "embed":
                has_table = name in self.aux_embed
                table = look_up(self.aux_embed[name]) if has_table else None
                streams[name] = torch.zeros_like(x) if table is None else table
            elif isinstance(start, float):
                wide = torch.promote_types(x.dtype, torch.float32)
                streams[name] = torch.full((1,), start, dtype=wide, device=x.device)
            elif start == "zero":
                streams[name] = torch.zeros_like(x)
            elif start == "ones":
                streams[name] = torch.ones_like(x)
            else:  # a root is taken of these matrices, which needs the digits
                eye = torch.eye(self.config.head_dim, dtype=self.embed.tok_emb.weight.dtype, device=x.device)
                streams[name] = eye.expand(*x.shape[:2], -1, -1)
        return State(x, streams, {"x0": x} if self.config.embedding_skip else {})

    def _token_order(self, tokens: Tensor) -> Order | None:
        """What the kernel of the tables knows about tokens; None where plain PyTorch looks them up."""
        tables = [parameter for module in (self.embed, self.aux_embed) for parameter in module.parameters()]
        if not kernels.usable(*tables) or any(is_sharded(table) for table in tables):
            return None
        if any(is_adapted(module) for module in (*self.embed.modules(), *self.aux_embed.modules())):
            return None
        from stepformer.ops.embedding import token_order

        return token_order(tokens, self.config.vocab_size, train=any(table.requires_grad for table in tables))

    def _narrowed(self, kind: str) -> torch.dtype | None:
        return self.stream_dtype if self.stream_dtype is not None and torch.is_autocast_enabled(kind) else None

    def head(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) from the last x: final norm, the token table and, if there is one, the soft cap."""
        return self._logits(self.final_norm(x))

    def table(self) -> Tensor:
        """The token table as the head has it, adapters included."""
        return weight_of(self.embed.tok_emb, "The token table is also the head")

    def _logits(self, h: Tensor) -> Tensor:
        logits = F.linear(h, self.table())
        cap = self.config.logit_softcap
        if cap is None:
            return logits
        wide = logits if logits.dtype == torch.float64 else logits.float()  # bf16 has no room between 29.9 and 30
        return cap * torch.tanh(wide / cap)

    def _loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """The loss from the normalised last x; where kernels may run, from some rows of logits at a time."""
        table = self.table()
        kind = h.device.type
        if torch.is_autocast_enabled(kind):
            h = h.to(torch.get_autocast_dtype(kind))  # as F.linear would
        if kernels.usable(h, table) and not is_sharded(table):
            from stepformer.ops.loss import linear_cross_entropy

            return linear_cross_entropy(h.flatten(0, 1), table, targets.flatten(), self.config.logit_softcap)
        return _cross_entropy(self._logits(h), targets)

    @torch.no_grad()
    def observe(self, tokens: Tensor, *, rows: bool = True) -> list[dict[str, list[Tensor]]]:
        """What the oracles report about themselves on tokens (B, T): one dictionary per layer, in order of the calls.

        Constrained attention reports `capped_rows`, the share of rows whose target is out of reach, and its inverse
        temperatures `beta` (B, H, T); Hamiltonian attention `bounded_scores`, the share of scores beyond their bound.
        With `rows`, attentions also report the `entropy` of every row of weights in nats and the `energy` of every
        row, both (B, H, T) (docs/inside-the-network.md); linear attention has an energy of one head and no entropy.
        """
        self._check(tokens, None, None, None, False)
        call = fresh_call(tokens.long(), None, self.config.document_separator)
        s = self.start(tokens.long(), call.positions)
        layers: list[dict[str, list[Tensor]]] = []
        for i, block in enumerate(self.blocks):
            seen: dict[str, list[Tensor]] = {}

            def note(name: str, value: Tensor, seen: dict[str, list[Tensor]] = seen) -> None:
                seen.setdefault(name, []).append(value)

            s = block(s, replace(call, observe=note, rows=rows), i in self.plain_layers)
            layers.append(seen)
        return layers

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        last_only: bool = False,
        loss_only: bool = False,
    ) -> Output:
        """Logits for tokens (B, T), and the loss when targets are given.

        With a `cache` (see `new_cache`) the tokens continue what it holds, and no gradients are recorded. `lengths`
        (B,) says how many of each row's tokens are real when prompts of different length are padded on the right.
        `last_only` returns the logits of each row's last real token alone, (B, 1, V); `loss_only` the loss alone,
        for which a GPU never holds the logits of all tokens. That loss has first derivatives only (`kernels.off`).
        """
        self._check(tokens, targets, cache, lengths, last_only)
        if loss_only and targets is None:
            raise InputError("`loss_only` needs targets: without them there is no loss.")
        with torch.no_grad() if cache is not None else contextlib.nullcontext():
            return self._forward(tokens.long(), targets, cache, lengths, last_only, loss_only)

    def _forward(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        cache: Cache | None,
        lengths: Tensor | None,
        last_only: bool,
        loss_only: bool,
    ) -> Output:
        separator = self.config.document_separator
        call = fresh_call(tokens, lengths, separator) if cache is None else cache.call(tokens, lengths, separator)
        start = self.start(tokens, call.positions, from_zero=cache is None)
        checkpointing = self.config.activation_checkpointing and self.training and torch.is_grad_enabled()
        s: State | Moving = start
        if not checkpointing and self._fuses(start, call):
            banks = [block.coefficients for block in self.blocks]
            s = Moving.begin(start, weights_of([block.template for block in self.blocks], banks))
        # no layer draws random numbers, but an adapter's dropout does
        draws = checkpointing and any(map(is_adapted, self.blocks.modules()))
        with contextlib.nullcontext() if checkpointing else rounded_maps(self.blocks):
            for i, block in enumerate(self.blocks):
                if cache is not None:
                    call = replace(call, slots=cache.slots[i])
                plain = i in self.plain_layers
                if checkpointing:
                    s = checkpoint(block, s, call, plain, use_reentrant=False, preserve_rng_state=draws)
                else:
                    s = block(s, call, plain)
        if cache is not None:
            cache.advance(call, tokens.shape[1])
        h = s.finish(self.final_norm) if isinstance(s, Moving) else s.x
        if last_only:
            h = h[:, -1:] if lengths is None else h[torch.arange(len(h), device=h.device), lengths - 1][:, None]
        if not isinstance(s, Moving):
            h = self.final_norm(h)
        if loss_only and targets is not None:
            return Output(None, self._loss(h, targets))
        logits = self._logits(h)
        return Output(logits, None if targets is None else _cross_entropy(logits, targets))

    def _fuses(self, s: State, call: Call) -> bool:
        """Whether the streams may run through kernels that fuse the boundaries of the turns (schemes/fused.py)."""
        return (
            kernels.usable(s.x, *s.streams.values())
            and not self.plain_layers
            and same_norms(self.final_norm)
            and all(block.fuses(call) for block in self.blocks)
            and alike([block.template for block in self.blocks])
        )

    def _check(
        self, tokens: Tensor, targets: Tensor | None, cache: Cache | None, lengths: Tensor | None, last_only: bool
    ) -> None:
        """Refuse bad input with a sentence. Values are looked at on CPU only: no synchronisation on a device."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not _is_integer(tokens):
            what = (
                f"{tokens.dtype} of shape {tuple(tokens.shape)}"
                if isinstance(tokens, Tensor)
                else type(tokens).__name__
            )
            raise InputError(f"Tokens should be a tensor of integers of shape (batch, time), not {what}.")
        batch, time = tokens.shape
        if time == 0:
            raise InputError("There are no tokens: a sequence needs at least one.")
        if cache is None and time > self.config.context:
            raise InputError(f"The sequence has {time} tokens, but the model's context is {self.config.context}.")
        if targets is not None and targets.shape != tokens.shape:
            raise InputError(f"Targets have shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}.")
        if targets is not None and last_only:
            raise InputError("`last_only` gives the logits of one token a row; it cannot be combined with targets.")
        if lengths is not None and not (isinstance(lengths, Tensor) and _is_integer(lengths)):
            raise InputError("`lengths` should be a tensor of integers, one per row.")
        if lengths is not None and lengths.shape != (batch,):
            raise InputError(f"`lengths` should have one entry per row, {batch}, not shape {tuple(lengths.shape)}.")
        if cache is not None and [len(layer) for layer in cache.slots] != self._attention_calls():
            raise InputError("This cache was made for another architecture: make it with this model's new_cache().")
        # not fake, not distributed, not inside vmap or grad: a plain tensor on the CPU
        has_values = type(tokens) is Tensor and tokens.device.type == "cpu"
        if has_values and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            check_ids(tokens, self.config.vocab_size)
            if targets is not None:
                check_ids(targets[targets != IGNORE], self.config.vocab_size, "target")
            if lengths is not None and not bool(((lengths >= 1) & (lengths <= time)).all()):
                raise InputError(f"`lengths` should lie between 1 and {time}, the width of the tokens.")

    def _attention_calls(self) -> list[int]:
        return [block.calls()["attn"] for block in self.blocks]

    def new_cache(self, batch: int, capacity: int | None = None, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for incremental decoding; `capacity` defaults to the context."""
        capacity = self.config.context if capacity is None else capacity
        if not 1 <= capacity <= self.config.context:
            raise InputError(f"A cache holds 1 to {self.config.context} tokens, the model's context, not {capacity}.")
        weight = self.embed.tok_emb.weight
        kind = weight.device.type
        if dtype is None:
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        slots = [
            [block.attn.new_slot(batch, capacity, weight.device, dtype) for _ in range(calls)]
            for block, calls in zip(self.blocks, self._attention_calls(), strict=True)
        ]
        return Cache(slots, batch, capacity, weight.device)

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Collection[int] | None = None,
        seed: int | None = None,
        on_context_end: Literal["stop", "slide"] = "stop",
        beams: int | None = None,
        length_penalty: float = 1.0,
    ) -> Generation:
        """Continue one prompt or several of different length; `decoding.sampling.stream` explains the settings.

        With `beams` nothing is drawn: each prompt gets its best continuation by beam search (`decoding.beams`).
        """
        from stepformer.decoding.beams import beam_search
        from stepformer.decoding.sampling import Generation, stream

        if beams is not None:
            if temperature != 1.0 or (top_k, top_p, seed) != (None, None, None):
                raise InputError("Beam search draws nothing: temperature, top_k, top_p and seed do not go with beams.")
            return beam_search(
                self,
                prompts,
                beams=beams,
                length_penalty=length_penalty,
                max_new_tokens=max_new_tokens,
                stop=stop,
                on_context_end=on_context_end,
            )
        if length_penalty != 1.0:
            raise InputError(f"length_penalty = {length_penalty} ranks beams: it needs `beams`.")
        result = Generation([], [])
        steps = stream(
            self,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            seed=seed,
            on_context_end=on_context_end,
            result=result,
        )
        for _ in steps:
            pass
        return result

    def hybrid(self, *, layers: Collection[int] | None = None, cutoff: int | None = None) -> Model:
        """The same weights with momentum in some layers only, the others as plain residual blocks.

        `layers`: the set of momentum layers; `cutoff=c`: layers below c. The velocity passes through plain layers
        unchanged. For checkpoints trained with a velocity template under Lie-Trotter (heavy ball, Nesterov, triple
        momentum). The result shares parameters (and the state dict) with this model.
        """
        config = self.config
        if config.splitting != "lie-trotter" or not templates[config.template].component.has_velocity():
            raise InputError(
                "Hybrid inference replaces Lie-Trotter momentum blocks by plain ones; this model has template "
                f"'{config.template}' and splitting '{config.splitting}'."
            )
        if (layers is None) == (cutoff is None):
            raise InputError("Give either `layers` (a set of layer numbers) or `cutoff` (a layer number).")
        momentum: Iterable[int] = range(cutoff) if cutoff is not None else layers or ()
        momentum = frozenset(momentum)
        if cutoff is not None and not 0 <= cutoff <= config.n_layer:
            raise InputError(f"cutoff = {cutoff} should lie between 0 and {config.n_layer}, the number of layers.")
        if any(not 0 <= i < config.n_layer for i in momentum):
            raise InputError(f"Layers are numbered 0 to {config.n_layer - 1}; {sorted(momentum)} was asked for.")
        twin = copy.copy(self)  # shares modules and parameters; only the choice of layers is its own
        twin._modules = dict(self._modules)
        twin.plain_layers = frozenset(range(config.n_layer)) - momentum
        return twin


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    # float(): under bf16 autocast the head is bf16, the softmax must not be
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.long().flatten(), ignore_index=IGNORE)


def _is_integer(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool


def check_ids(ids: Tensor, vocab_size: int, what: str = "token") -> None:
    """Refuse ids outside the vocabulary."""
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"Found {what} id {low if low < 0 else high}, but the vocabulary has ids 0 to {vocab_size - 1}: "
            "was the text encoded with another tokenizer?"
        )
