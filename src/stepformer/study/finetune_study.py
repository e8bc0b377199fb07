"""Plans for fine-tuning studies: from pretrained runs to a target corpus, or from nothing in both directions.

STUDY/LABEL-sSEED/                one direction: a fine-tuning run for each pretrained one
STUDY/forgetting.{md,csv,json,png}

STUDY/tokenizer/                  both directions: a BPE trained on both corpora, if one is needed
STUDY/pretrain-A/LABEL-sSEED/     the runs on each corpus
STUDY/A-to-B/LABEL-sSEED/         and their fine-tuning on the other (A-to-B-native/ with the runs' own optimizers)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import InputError, command_line
from stepformer.base.words import parse_override, parse_overrides
from stepformer.data.corpus import MANIFEST, TOKENIZER, Corpus
from stepformer.data.opening import open_source
from stepformer.data.prepare import shared_tokenizer
from stepformer.data.sources import TALES_COUNT
from stepformer.data.tokenizers import tokenizer_kind
from stepformer.study.study import Planned, plan_runs
from stepformer.training.config import DataConfig, RunConfig
from stepformer.training.corpora import check_tokenizers, open_corpus, same_corpus
from stepformer.training.finetuning import FinetuneConfig, finetune_config
from stepformer.training.loading import trained_on
from stepformer.training.parallel import ALONE
from stepformer.training.runs import RunFolder, checkpoint_of


@dataclass(frozen=True)
class Pretrained:
    """A run to fine-tune: its record, its config, the corpus it was trained on and the step of its best weights."""

    folder: RunFolder
    record: dict[str, Any]
    config: RunConfig
    corpus: Corpus
    step: int

    @property
    def label(self) -> str:
        return str(self.record.get("label") or self.config.title)


def open_pretrained(path: str | Path, source: str | None = None, *, quiet: bool = False) -> Pretrained:
    """A finished run; `source` names its corpus if it was imported without one, or where it is if it was moved."""
    folder = RunFolder(Path(os.path.normpath(path)))
    record, config = folder.opened()
    if record.get("corpus"):
        corpus = (
            trained_on(folder, record)
            if source is None
            else same_corpus(record["corpus"], folder, config, ALONE, source)
        )
    elif source is not None:
        corpus = _open(source, str(folder.tokenizer), TALES_COUNT, quiet)
    else:
        raise InputError(f"'{folder.path}' came without a corpus: say with --source what it was trained on.")
    step = int(checkpoint_of(folder, "best")[1]["step"])
    if record.get("corpus") and not folder.result.is_file() and step < config.train.steps:
        resume = command_line("resume", folder.path)
        raise InputError(f"The run '{folder.path}' is not finished: `{resume}` continues it, then fine-tune.")
    return Pretrained(folder, record, config, corpus, step)


def plan_finetuning(
    out: Path, runs: Sequence[Pretrained], target: Corpus, settings: FinetuneConfig, *, quiet: bool = False
) -> tuple[list[Planned], FinetuneConfig]:
    """A fine-tuning run for each pretrained one, seeds outermost; and the settings they all have."""
    first, seen = runs[0], dict[tuple[str, int], Pretrained]()
    for run in runs:
        for name in ("train", "val"):
            one, two = (pretrained.corpus.split(name).hash for pretrained in (first, run))
            if one != two:
                others = f"were trained on different corpora ({name} splits {one} and {two})"
                both = f"'{first.folder.path}' and '{run.folder.path}'"
                raise InputError(f"{both} {others}: fine-tune them in studies of their own.")
        seed = run.config.train.seed
        twin = seen.setdefault((run.label, seed), run)
        if twin is not run:
            both = f"'{twin.folder.path}' and '{run.folder.path}'"
            raise InputError(f"{both} are both seed {seed} of '{run.label}': give one.")
    check_tokenizers(target, first.corpus)
    if target.split("val").hash == first.corpus.split("val").hash:
        raise InputError(f"'{target.folder}' is the corpus that the runs were trained on: nothing would be forgotten.")
    if "," in str(first.corpus.folder):  # it separates the folders of [data] also
        raise InputError(f"The folder '{first.corpus.folder}' has a comma in its name: rename it.")
    settled = settings.settled([run.config for run in runs])
    labels = list(dict.fromkeys(run.label for run in runs))
    ordered = sorted(runs, key=lambda run: (run.config.train.seed, labels.index(run.label)))
    labelled = [
        (run.label, finetune_config(run.config, run.folder.path, first.corpus.folder, target.folder, settled))
        for run in ordered
    ]
    planned = plan_runs(out, labelled, quiet=quiet)
    for run, new in zip(ordered, planned, strict=True):
        began = new.folder.read().get("init", {}) if new.folder.exists else None
        then, now = [(of.get("id"), of.get("step")) for of in (began or {}, {**run.record, "step": run.step})]
        if began is not None and then != now:  # a study that is continued takes up no runs with other weights
            others = f"other weights than the best of '{run.folder.path}' now"
            told = f"(run {then[0]} at step {then[1]}, not {now[0]} at {now[1]})"
            raise InputError(f"'{new.folder.path}' began with {others} {told}: choose another --out.")
    return planned, settled


def target_corpus(word: str, run: Pretrained, *, quiet: bool = False) -> Corpus:
    """The corpus that a word names, with the run's tokenizer: a folder, a name, or `tales:DIALECT`, made if need be."""
    made_of = run.corpus.manifest.get("source", {})
    count = int(made_of.get("count", TALES_COUNT)) if made_of.get("kind") == "tales" else TALES_COUNT
    return _open(word, str(run.folder.tokenizer), count, quiet)


def two_corpora(words: Sequence[str], out: Path, given: dict[str, Any], *, quiet: bool = False) -> list[Corpus]:
    """Two corpora with one tokenizer; `given` may hold `tokenizer` and, for tales, `count`.

    A corpus that is prepared brings its tokenizer. For two dialects of the tales a BPE is trained on both, so that
    neither is written in the other's words.
    """
    if len(words) != 2 or words[0] == words[1]:
        raise InputError("Name two different corpora, e.g. --corpora tales:village tales:space.")
    asked = DataConfig.from_dict(given)
    prepared = [Path(word) for word in words if (Path(word).expanduser() / MANIFEST).is_file()]
    usual = "bpe:1024" if all(_named(word, 0)["corpus"] == "tales" for word in words) else "gpt2"
    spec, count = asked.tokenizer or (str(prepared[0]) if prepared else usual), asked.count
    if tokenizer_kind(spec)[0] == "bpe" and not prepared:  # trained on both corpora, once for a study
        named = [_named(word, count) for word in words]
        sources = [open_source(data.pop("corpus"), **data) for data in named]
        about = {"tokenizer": spec, "sources": [source.description for source in sources]}
        folder, told = out / TOKENIZER, out / "corpora.json"
        if told.is_file() and documents.read(told, documents.CORPORA) != about:
            raise InputError(f"'{out}' was begun with other corpora or another tokenizer: choose another --out.")
        if not told.is_file():
            shared_tokenizer(sources, spec, folder)
            files.write_json(told, about)
        spec = str(folder)
    found = [_open(word, spec, count, quiet) for word in words]
    check_tokenizers(found[1], found[0])
    if found[0].split("val").hash == found[1].split("val").hash:
        raise InputError(f"'{words[0]}' and '{words[1]}' are the same corpus.")
    return found


def _open(word: str, tokenizer: str, count: int, quiet: bool) -> Corpus:
    named = _named(word, count)
    prepared = "dialect" not in named and (Path(word).expanduser() / MANIFEST).is_file()  # it has its own tokenizer
    return open_corpus(DataConfig(**named, tokenizer=None if prepared else tokenizer), ALONE, quiet=quiet)


def _named(word: str, count: int) -> dict[str, Any]:
    """What [data] has to say of a corpus; `tales:DIALECT` are tales."""
    name, _, dialect = word.partition(":")
    return {"corpus": name, "dialect": dialect or None, "count": count} if name == "tales" else {"corpus": word}


def corpus_names(one: Corpus, two: Corpus) -> tuple[str, str]:
    """Short names to tell two corpora apart: dialects of the tales, else what they were made from, else folders."""
    first, second = (str(c.manifest.get("source", {}).get("dialect") or c.name) for c in (one, two))
    return (first, second) if first != second else (one.folder.name, two.folder.name)


def divided_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any], list[str]]:
    """`key=value` words of a study in both directions: for pretraining, for its corpora, for fine-tuning."""
    pretraining, finetuning, corpora = [], [], {}
    for word in words:
        key, value = parse_override(word)
        name = key.removeprefix("data.")
        if key.startswith("finetune."):
            finetuning.append(word)
        elif name in ("count", "tokenizer"):
            corpora[name] = value
        elif name in ("corpus", "dialect", "also") or key.removeprefix("train.") == "init":
            raise InputError(f"'{word}' does not go here: --corpora names the two corpora, e.g. tales:village.")
        else:
            pretraining.append(word)
    return pretraining, corpora, finetuning


def finetune_settings(words: Sequence[str], *, native: bool) -> FinetuneConfig:
    """Settings from `finetune.key=value` or `key=value` words."""
    values = {key.removeprefix("finetune."): value for key, value in parse_overrides(words)}
    return FinetuneConfig.from_dict({**values, **({"native": True} if native else {})})
