"""What a language model is made of: embedding tables, blocks, a final norm and a head, usually the token table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepformer.base.errors import InputError, given
from stepformer.base.settings import checked
from stepformer.decoding.cache import Cache
from stepformer.extras import chosen
from stepformer.model.block import Block
from stepformer.model.config import ModelConfig
from stepformer.model.roles import Role, declare
from stepformer.model.start import draw_parameters
from stepformer.ops.adapters import weight_of
from stepformer.ops.cross_entropy import wide
from stepformer.ops.dtypes import refuse_no_dtype
from stepformer.ops.tables import Tables, token_order
from stepformer.oracles import Call, fresh_call, make_norm
from stepformer.rules import State


class Blocks(nn.ModuleList):
    """A ModuleList whose items are known to be blocks."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...

        def __getitem__(self, index: int) -> Block: ...  # type: ignore[override]


class Plans(dict[frozenset[int], Any]):
    """What an engine has planned for a model, by the layers that are plain; a copy makes its own."""

    def __reduce__(self) -> tuple[type[Plans], tuple[()]]:
        return Plans, ()


def shared_oracles(blocks: Blocks, sharing: str) -> nn.ModuleDict:
    """Oracles that all of several blocks ask, taken from the first; a weight is unused if no block uses it."""
    shared = nn.ModuleDict()
    for oracle in {"off": (), "attention": ("attn",), "oracles": ("attn", "mlp")}[sharing] if len(blocks) > 1 else ():
        shared[oracle], own = getattr(blocks[0], oracle), [getattr(block, oracle).parameters() for block in blocks]
        for weights in zip(*own, strict=True):
            weights[0].requires_grad_(any(weight.requires_grad for weight in weights))
        for block in blocks:
            block.use(oracle, shared[oracle])
    return shared


class Backbone(nn.Module):
    """The parameters of a model, what state its tokens start in, and what the head makes of the last one."""

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
        self.stream_dtype: torch.dtype | None = None  # see `carried_in`
        self.parts = chosen(config)
        self.plans = Plans()

        def tables() -> Tables:
            learned = config.positions == "learned"
            return Tables(config.vocab_size, config.d_model, config.context if learned else None)

        with torch.device("meta"):  # allocated and drawn once, in reset_parameters
            self.embed = tables()
            blocks = Blocks(Block(config, layer=i) for i in range(config.n_layer))
            streams = blocks[0].template.streams
            self.starts = {name: stream.start for name, stream in streams.items() if stream.start != "later"}
            tabled = [name for name, start in self.starts.items() if start == "embed" and config.aux_init == "embed"]
            tabled += [name for part in self.parts for name in part.tables]
            self.aux_embed = nn.ModuleDict({name: tables() for name in tabled})
            self.blocks = blocks
            self.shared = shared_oracles(blocks, config.weight_sharing)
            self.final_norm = make_norm(config.norm, config.d_model, eps=config.norm_eps, bias=config.bias)
            self.lm_head: nn.Module | None = None
            if config.head == "untied":
                self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
                declare(self.lm_head, weight=Role.HEAD)
        try:
            target = torch.get_default_device() if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise InputError(f"device = {device!r} is none of torch's: give 'cpu', 'cuda' or 'cuda:1'.") from None
        refuse_no_dtype("dtype", dtype)
        if target.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device = '{target}' was asked for, but this torch sees no CUDA device.")
        if target.type != "meta":
            self.to_empty(device=target)
            if dtype is not None:
                self.to(dtype)
            self.reset_parameters(seed)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the initial weights (start.py); without a seed one is drawn from torch's global generator."""
        owners = {f"blocks.{i}.{name}": part for i, b in enumerate(self.blocks) for name, part in b.named_children()}
        owners |= {f"shared.{name}": part for name, part in self.shared.items()}
        maps = {name: getattr(part, "output_map", None) for name, part in owners.items()}
        deep = {f"{name}.{output}.weight" for name, output in maps.items() if output is not None}
        draw_parameters(self, seed, deep, self.config.n_layer, zero=self.config.output_init == "zero")

    @property
    def device(self) -> torch.device:
        return self.embed.tok_emb.weight.device

    def call_of(self, tokens: Tensor, lengths: Tensor | None = None, cache: Cache | None = None) -> Call:
        """How a forward pass over tokens (B, T) sees them, after those in a cache."""
        if cache is None:
            return self.confined(fresh_call(tokens, lengths), tokens, torch.zeros_like(tokens[:, 0]))
        return self.confined(cache.call(tokens, lengths), tokens, cache.origins)

    def confined(self, call: Call, tokens: Tensor, origins: Tensor) -> Call:
        """The call as the extras restrict it; the rows' last documents began at `origins` (B,)."""
        for part in self.parts:
            call = part.confine(call, tokens, origins)
        return call

    def carried_in(self, device: str) -> torch.dtype | None:
        """What x and the streams that start from tables are carried in; None: as the weights.

        Under autocast as `stream_dtype` says. If it says nothing, bf16 autocast on CUDA carries bf16, in the trainer
        and in anybody's loop (docs/performance.md has the difference in loss).
        """
        refuse_no_dtype("stream_dtype", self.stream_dtype)
        if (self.stream_dtype is None and device != "cuda") or not torch.is_autocast_enabled(device):
            return None
        narrow = torch.get_autocast_dtype(device) == torch.bfloat16
        return self.stream_dtype or (torch.bfloat16 if narrow else None)

    def start(self, tokens: Tensor, positions: Tensor, *, from_zero: bool = False) -> State:
        """The state before the first layer: token embedding, and each auxiliary stream at its start.

        `from_zero` promises that the positions are 0, 1, ... in every row: a kernel counts for itself then.
        """
        order = token_order(tokens, (self.embed, self.aux_embed)) if from_zero else None
        dtype = self.carried_in(tokens.device.type)

        def look_up(tables: nn.Module) -> Tensor:
            found: Tensor = tables(tokens, positions, order, dtype)
            return found if dtype is None else found.to(dtype)

        x = look_up(self.embed)
        tabled = {name: look_up(tables) for name, tables in self.aux_embed.items()}
        streams = {}
        for name, start in self.starts.items():
            if name in tabled:
                streams[name] = tabled[name]
            elif isinstance(start, float):
                wide_dtype = torch.promote_types(x.dtype, torch.float32)
                streams[name] = torch.full((1,), start, dtype=wide_dtype, device=x.device)
            elif start == "identity":  # a root is taken of these matrices, which needs the digits
                eye = torch.eye(self.config.head_dim, dtype=self.embed.tok_emb.weight.dtype, device=x.device)
                streams[name] = eye.expand(*x.shape[:2], -1, -1)
            elif start == "copy":
                streams[name] = x
            else:
                streams[name] = torch.ones_like(x) if start == "ones" else torch.zeros_like(x)
        return State(x, streams, self.remembered(x, tabled))

    def remembered(self, x: Tensor, tabled: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What extras remember from before the first layer, by name; `tabled` are the rows of all tables but x's."""
        found = {name: tabled[name] for part in self.parts for name in part.tables}
        owners: dict[str, Any] = {}
        for part in self.parts:
            new = given(part.start(x), part, "start", dict)
            if taken := sorted(new.keys() & owners.keys()):
                both = f"'{owners[taken[0]].name}' and '{part.name}'"
                raise InputError(f"The extras {both} both remember something as '{taken[0]}': rename one of them.")
            owners |= dict.fromkeys(new, part)
            found |= new
        return found

    def plan(self, *, ready: bool = False) -> Any:
        """What an engine does between the oracles, `ready` to be run, or a sentence about why it cannot."""
        raise NotImplementedError

    def table(self) -> Tensor:
        """The head (V, d), the token table unless it has weights of its own, adapters included."""
        if self.lm_head is not None:
            return weight_of(self.lm_head, "The loss needs the weights of the head")
        return weight_of(self.embed.tok_emb, "The token table is also the head")

    def head(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) from the last x: final norm, the head's weights, and what extras make of them."""
        return self.logits_of(self.final_norm(x))

    def logits_of(self, h: Tensor) -> Tensor:
        """Logits from the normalised last x."""
        logits = F.linear(h, self.table())
        for part in self.parts:
            if part.changes("logits"):
                logits = part.logits(wide(logits))
        return logits

    def attention_calls(self) -> list[int]:
        """How often each block asks its attention."""
        return [block.calls()["attn"] for block in self.blocks]

    def new_cache(self, batch: int, capacity: int | None = None, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for incremental decoding.

        Args:
            batch: How many rows it holds.
            capacity: How many tokens of each, by default the context.
            dtype: Of what is stored; by default that of the weights, or of autocast.
        """
        batch = checked("batch", batch, int)
        if batch < 1:
            raise InputError(f"A cache holds 1 row or more, not {batch}.")
        capacity = self.config.context if capacity is None else checked("capacity", capacity, int)
        if not 1 <= capacity <= self.config.context:
            raise InputError(f"A cache holds 1 to {self.config.context} tokens, the model's context, not {capacity}.")
        weight = self.embed.tok_emb.weight
        kind = weight.device.type
        if dtype is None:
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        slots = [
            [block.attn.new_slot(batch, capacity, weight.device, dtype) for _ in range(calls)]
            for block, calls in zip(self.blocks, self.attention_calls(), strict=True)
        ]
        return Cache(slots, batch, capacity, weight.device)
