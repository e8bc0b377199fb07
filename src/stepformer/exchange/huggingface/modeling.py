"""A stepformer model with the interface of `transformers`: forward, generate, save_pretrained, from_pretrained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache as TransformersCache
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import TransformersKwargs

from stepformer.base import files
from stepformer.base.errors import InputError
from stepformer.decoding.cache import Cache
from stepformer.exchange.huggingface.configuration import CODE, CODE_FILE, StepformerConfig
from stepformer.model import IGNORE, Model
from stepformer.ops.cross_entropy import wide
from stepformer.ops.tables import check_integers

logger = logging.getLogger(__name__)
# What others take and we do not, with what there is instead.
INSTEAD = {
    "position_ids": "positions are counted over the real tokens of `attention_mask`",
    "output_attentions": "`model.model.observe(input_ids)` reports about its attention",
    "output_hidden_states": "`stepformer diagnose` follows its streams through the layers",
}


class StepformerCache(TransformersCache):
    """What a model remembers of past tokens, whatever its attention; made at its first use.

    `transformers` counts columns, padding included (`columns`); the cache inside counts each row's real tokens.
    """

    is_compileable = is_croppable = False

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(layers=[])
        self.capacity = capacity  # tokens a row; None: the model's context
        self.columns = 0
        self.inner: Cache | None = None

    def open(self, model: Model, batch: int) -> Cache:
        """The cache inside, made for so many rows if there is none yet."""
        if self.inner is None:
            self.inner = model.new_cache(batch, self.capacity)
        return self.inner

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return -1 if self.inner is None else self.inner.capacity

    get_max_length = get_max_cache_shape

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.inner is not None:
            self.inner.select(beam_idx.to(self.inner.lengths.device).long())

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def reset(self) -> None:
        self.columns, self.inner = 0, None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            "A stepformer cache cannot forget its last tokens, since some attentions keep sums of all of them: "
            "assisted and speculative decoding need another model."
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise InputError("A stepformer cache is filled by the model's own forward pass, not by update().")

    def __len__(self) -> int:
        return 0 if self.inner is None else len(self.inner.slots)

    def __repr__(self) -> str:
        return f"StepformerCache(rows={self.batch_size}, columns={self.columns})"

    @property
    def batch_size(self) -> int:
        return -1 if self.inner is None else self.inner.batch

    @property
    def is_initialized(self) -> bool:
        return self.inner is not None


class StepformerForCausalLM(PreTrainedModel, GenerationMixin):
    """Wraps `Model`: logits, weights and caches are its own.

    Rows of a batch may be padded on either side; `attention_mask` says which tokens are real. Positions are counted
    over real tokens, and the logits of padding are zero.
    """

    config_class = StepformerConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True  # some attentions keep a running sum, which cannot go back a few tokens
    _no_split_modules = ["Block"]
    keep_logits = False  # whether there are logits in training with labels

    def __init__(self, config: StepformerConfig) -> None:
        super().__init__(config)
        self.model = Model(config.model_config())
        self.post_init()

    @classmethod
    def of(cls, model: Model, **kwargs: Any) -> StepformerForCausalLM:
        """The same model, sharing its weights; `kwargs` go into the config."""
        with torch.device("meta"):
            shell = cls(StepformerConfig.of(model.config, **kwargs))
        shell.model = model
        shell.config.dtype = shell.dtype
        return shell.train(model.training)

    @classmethod
    def from_pretrained(cls, where: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in `transformers`, but weights that do not belong to the architecture are refused, not drawn anew."""
        model, info = super().from_pretrained(where, *args, output_loading_info=True, **kwargs)
        for kind, words in (("missing_keys", "lacks"), ("unexpected_keys", "has unknown"), ("mismatched_keys", "has")):
            if info[kind]:
                first = sorted(str(key) for key in info[kind])[0]
                raise InputError(f"The weights in '{where}' belong to another model: it {words} '{first}'.")
        for name in model.model.unused_parameters():  # loading makes new parameters, all of them trained
            model.model.get_parameter(name).requires_grad_(False)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`, with the two lines of code by which `trust_remote_code=True` finds this package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        files.write_text(Path(save_directory) / CODE_FILE, CODE)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: what is saved refers to the installed package and needs no copy of its source."""

    def _init_weights(self, module: nn.Module) -> None:
        """`Model` draws its own weights when it is made."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed.tok_emb

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise InputError(
            "The token table of a stepformer model cannot be exchanged alone: head and streams go with it."
        )

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.lm_head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
        """Refused unless nothing changes."""
        size = self.config.vocab_size
        if new_num_tokens not in (None, size):
            raise InputError(
                f"A stepformer model keeps its vocabulary of {size} ids; {new_num_tokens} were asked for. Auxiliary "
                "streams have tables of their own, so a new vocabulary means a new model."
            )
        return self.get_input_embeddings()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.model.config = self.model.config.replace(activation_checkpointing=True)

    def gradient_checkpointing_disable(self) -> None:
        self.model.config = self.model.config.replace(activation_checkpointing=False)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.config.activation_checkpointing

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StepformerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        next_token: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Logits, and with `labels` (not shifted; -100 is ignored) their mean cross-entropy.

        In training with labels there is the loss alone, for which a GPU never holds the logits of all tokens: set
        `model.keep_logits = True` for a loop that looks at them.
        With a cache (`past_key_values` from an earlier call, or `use_cache=True` outside training) no gradients are
        recorded. `attention_mask` covers the columns of the cache too. `next_token` is what `generate` asks for: the
        logits after each row's last real token alone, (B, 1, V), with ids that only pad the vocabulary ruled out.
        """
        if input_ids is None:
            raise InputError("A stepformer model reads `input_ids`: auxiliary streams have token tables of their own.")
        self._refuse(kwargs)
        check_integers(input_ids, "input_ids")
        input_ids = input_ids.long()
        if past_key_values is None and use_cache and not self.training:
            past_key_values = StepformerCache()
        cache = None
        if past_key_values is not None:
            _check_cache(past_key_values)
            cache = past_key_values.open(self.model, input_ids.shape[0])
        tokens, lengths, real = packed(input_ids, attention_mask, cached=cache is not None)
        if labels is not None and self.training and cache is None and real is None and not self.keep_logits:
            checked = check_labels(labels, tokens).to(tokens.device)
            alone = self._loss_alone(tokens, checked, num_items_in_batch)
            return self._output(return_dict, loss=alone)
        logits = self.model(tokens, cache=cache, lengths=lengths, last_only=next_token).logits
        if past_key_values is not None:
            past_key_values.columns += input_ids.shape[1]
        if next_token:
            logits = self._only_real_ids(logits)
        elif real is not None:
            logits = unpacked(logits, real)
        loss = None if labels is None else causal_loss(logits, labels, num_items_in_batch)
        logits = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        return self._output(return_dict, loss=loss, logits=logits, past_key_values=past_key_values)

    def _output(self, return_dict: bool | None, **found: Any) -> Any:
        output = CausalLMOutputWithPast(**found)
        as_tuple = return_dict is False or (return_dict is None and not getattr(self.config, "return_dict", True))
        return output.to_tuple() if as_tuple else output

    def _loss_alone(self, tokens: Tensor, labels: Tensor, count: int | Tensor | None) -> Tensor:
        """As `causal_loss`."""
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        loss = self.model(tokens, targets, loss_only=True).loss
        assert isinstance(loss, Tensor)
        if count is None:
            return loss
        share = (targets != IGNORE).sum() / (count.to(loss.device) if isinstance(count, Tensor) else count)
        return loss * share

    def _refuse(self, given: dict[str, Any]) -> None:
        """Say so if something is asked for, in a call or in the config, that would be ignored."""
        flags = {key: getattr(self.config, key, None) for key in ("output_attentions", "output_hidden_states")}
        asked = {**flags, **{key: value for key, value in given.items() if value is not None}}
        for key, value in sorted(asked.items()):
            if value is not None and value is not False:
                instead = f": {INSTEAD[key]}" if key in INSTEAD else ""
                raise InputError(f"A stepformer model does not take `{key}`{instead}.")

    def _only_real_ids(self, logits: Tensor) -> Tensor:
        real = self.config.real_vocab
        if real is None or real == logits.shape[-1]:
            return logits
        return torch.cat([logits[..., :real], torch.full_like(logits[..., real:], -torch.inf)], dim=-1)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: StepformerCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What the next forward pass of `generate` reads: the tokens that the cache does not have yet."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        width = input_ids.shape[1]
        # the whole text so far, or only its new part: a chunk of a long prompt, say, never longer than what is seen
        whole = width > seen if attention_mask is None else attention_mask.shape[1] == width
        input_ids = input_ids[:, seen:] if whole else input_ids
        # `generate` adds words of its own; what any model might have been asked for is passed on, to be refused
        given = {key: value for key, value in kwargs.items() if key in TransformersKwargs.__optional_keys__}
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}
        return {**given, **inputs, "use_cache": use_cache, "next_token": True}

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Our own cache instead of keys and values only, as long as the text may become."""
        given = model_kwargs.get("past_key_values")
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation = '{generation_config.cache_implementation}' does not fit a stepformer model, "
                "which brings its own cache: leave it out."
            )
        if given is not None:
            _check_cache(given)
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            context = self.config.context
            lasting = bool(generation_config.return_dict_in_generate)  # a cache that is handed out may be continued
            model_kwargs["past_key_values"] = StepformerCache(
                context if lasting else min(context, generation_config.max_length)
            )

    def _prepare_generated_length(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """Generation ends with the context: the last token is the one that follows a full context."""
        prepared = super()._prepare_generated_length(generation_config, *args, **kwargs)
        most = self.config.context + 1
        length = kwargs.get("input_ids_length", 0)
        if length >= most:
            raise InputError(f"The prompt has {length} tokens, but the model's context is {self.config.context}.")
        if prepared.max_length > most:
            logger.info("generation ends at %d tokens, one after the model's context", most)
            prepared.max_length = most
        return prepared


def check_labels(labels: Tensor, tokens: Tensor) -> Tensor:
    """The labels as int64, which -100 fits in."""
    check_integers(labels, "Labels")
    if labels.shape != tokens.shape:
        raise InputError(f"Labels have shape {tuple(labels.shape)}, the logits are for {tuple(tokens.shape)}.")
    return labels.long()


def causal_loss(logits: Tensor, labels: Tensor, count: int | Tensor | None = None) -> Tensor:
    """Cross-entropy of every label given what stands before it; over `count` tokens, or their own number."""
    labels = check_labels(labels, logits[..., 0])
    flat, targets = wide(logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device)
    total = F.cross_entropy(flat, targets, ignore_index=IGNORE, reduction="mean" if count is None else "sum")
    return total if count is None else total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _check_cache(given: Any) -> None:
    if not isinstance(given, StepformerCache):
        raise InputError(
            f"past_key_values should be the StepformerCache of an earlier call, not a {type(given).__name__}."
        )


# Batches padded as `transformers` likes it, on the left, on the right or anywhere. Stepformer counts positions from a
# row's first real token and pads on the right. So real tokens move to the front, in order, and their logits move back.


def packed(
    input_ids: Tensor, attention_mask: Tensor | None, *, cached: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The real tokens of every row at its beginning, the rows' lengths, and where they stood; None if all are real.

    A mask that also covers a cache ends with the new tokens.
    """
    if attention_mask is None:
        return input_ids, None, None
    width = input_ids.shape[1]
    fits = attention_mask.ndim == 2 and len(attention_mask) == len(input_ids)
    if not fits or attention_mask.shape[1] < width or (attention_mask.shape[1] > width and not cached):
        raise InputError(
            f"attention_mask should have one column for each token, (batch, time); it has shape "
            f"{tuple(attention_mask.shape)}, the tokens {tuple(input_ids.shape)}."
        )
    real = attention_mask[:, attention_mask.shape[1] - width :].to(input_ids.device) != 0
    if bool(real.all()):
        return input_ids, None, None
    lengths = real.sum(dim=1)
    if cached and bool((lengths == 0).any()):
        raise InputError("A row of this batch is padding only: with a cache every row needs at least one real token.")
    order = torch.argsort(real.logical_not().long(), dim=1, stable=True)[:, : max(1, int(lengths.max()))]
    tokens = input_ids.gather(1, order).masked_fill(~real.gather(1, order), 0)  # a padding id need not exist
    return tokens, lengths.clamp(min=1), real


def unpacked(logits: Tensor, real: Tensor) -> Tensor:
    """Logits (B, T, V) where the tokens stood, (B, columns, V); zero, so without any gradient, at padding.

    A padded column must not keep what stands there after packing: that has seen the whole row.
    """
    places = (real.cumsum(dim=1) - 1).clamp(min=0)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, places].masked_fill(~real[..., None], 0.0)
