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
from stepformer.data.prepare import shared_tokenizer
from stepformer.data.sources import TALES_COUNT, open_source
from stepformer.data.tokenizers import tokenizer_kind
from stepformer.study.study import ALONE, Planned, plan_runs
from stepformer.training.config import DataConfig, RunConfig
from stepformer.training.corpora import check_tokenizers, checked, open_corpus
from stepformer.training.finetuning import FinetuneConfig, finetune_config
from stepformer.training.run import trained_on
from stepformer.training.runs import RunFolder, checkpoint_of


@dataclass(frozen=True)
class Pretrained:
    """A run to fine-tune: its record, its config and the corpus it was trained on."""

    folder: RunFolder
    record: dict[str, Any]
    config: RunConfig
    corpus: Corpus

    @property
    def label(self) -> str:
        return str(self.record.get("label") or self.config.title)

    @property
    def seed(self) -> int:
        return self.config.train.seed


def open_pretrained(path: str | Path, source: str | None = None, *, quiet: bool = False) -> Pretrained:
    """A finished run; `source` names its corpus if it was imported without one."""
    folder = RunFolder(Path(os.path.normpath(path)))
    record, config = folder.opened()
    if source is not None and not record.get("corpus"):
        corpus = _open(source, str(folder.tokenizer), TALES_COUNT, quiet)
    elif not record.get("corpus"):
        raise InputError(f"'{folder.path}' was imported without a corpus: say with --source what it was trained on.")
    else:
        corpus = trained_on(folder, record)
    step = int(checkpoint_of(folder, "best")[1]["step"])
    if record.get("corpus") and not folder.result.is_file() and step < config.train.steps:
        raise InputError(
            f"The run '{folder.path}' is not finished: `{command_line('resume', folder.path)}` continues it, then "
            "fine-tune."
        )
    return Pretrained(folder, record, config, corpus)


def plan_finetuning(
    out: Path, runs: Sequence[Pretrained], target: Corpus, settings: FinetuneConfig, *, quiet: bool = False
) -> tuple[list[Planned], FinetuneConfig]:
    """A fine-tuning run for each pretrained one, seeds outermost; and the settings they all have."""
    first = runs[0]
    seen: dict[tuple[str, int], Pretrained] = {}
    for run in runs:
        _check_source(first, run)
        twin = seen.setdefault((run.label, run.seed), run)
        if twin is not run:
            raise InputError(
                f"'{twin.folder.path}' and '{run.folder.path}' are both seed {run.seed} of '{run.label}': give one."
            )
    check_tokenizers(target, first.corpus)
    if target.split("val").hash == first.corpus.split("val").hash:
        raise InputError(f"'{target.folder}' is the corpus that the runs were trained on: nothing would be forgotten.")
    if "," in str(first.corpus.folder):  # it separates the folders of [data] also
        raise InputError(f"The folder '{first.corpus.folder}' has a comma in its name: rename it.")
    settled = settings.settled([run.config for run in runs])
    labels = list(dict.fromkeys(run.label for run in runs))
    ordered = sorted(runs, key=lambda run: (run.seed, labels.index(run.label)))
    labelled = [
        (run.label, finetune_config(run.config, run.folder.path, first.corpus.folder, target.folder, settled))
        for run in ordered
    ]
    planned = plan_runs(out, labelled, quiet=quiet)
    for run, new in zip(ordered, planned, strict=True):
        _check_start(run, new)
    return planned, settled


def _check_source(first: Pretrained, run: Pretrained) -> None:
    for name in ("train", "val"):
        one, two = (pretrained.corpus.split(name).hash for pretrained in (first, run))
        if one != two:
            raise InputError(
                f"'{first.folder.path}' and '{run.folder.path}' were trained on different corpora ({name} splits {one} "
                f"and {two}): fine-tune them in studies of their own."
            )


def _check_start(run: Pretrained, new: Planned) -> None:
    """A study that is continued must not take up runs that began with weights which are no longer those of `run`."""
    if not new.folder.exists:
        return
    known = new.folder.read().get("init", {})
    step = int(checkpoint_of(run.folder, "best")[1]["step"])
    if (known.get("id"), known.get("step")) != (run.record.get("id"), step):
        raise InputError(
            f"'{new.folder.path}' began with other weights than the best of '{run.folder.path}' now "
            f"(run {known.get('id')} at step {known.get('step')}, not {run.record.get('id')} at {step}): choose "
            "another --out."
        )


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
    data = DataConfig.from_dict(given)
    prepared = [Path(word) for word in words if (Path(word).expanduser() / MANIFEST).is_file()]
    usual = "bpe:1024" if all(map(_tales, words)) else "gpt2"
    spec, count = data.tokenizer or (str(prepared[0]) if prepared else usual), data.count
    if tokenizer_kind(spec)[0] == "bpe" and not prepared:
        spec = _shared(words, spec, count, out)
    found = [_open(word, spec, count, quiet) for word in words]
    check_tokenizers(found[1], found[0])
    if found[0].split("val").hash == found[1].split("val").hash:
        raise InputError(f"'{words[0]}' and '{words[1]}' are the same corpus.")
    return found


def _shared(words: Sequence[str], spec: str, count: int, out: Path) -> str:
    """The folder of a BPE trained on both corpora, made once for a study."""
    sources = [open_source("tales", dialect=_dialect(w), count=count) if _tales(w) else open_source(w) for w in words]
    about = {"tokenizer": spec, "sources": [source.description for source in sources]}
    folder, told = out / TOKENIZER, out / "corpora.json"
    if told.is_file() and documents.read(told, documents.CORPORA) != about:
        raise InputError(f"'{out}' was begun with other corpora or another tokenizer: choose another --out.")
    if not told.is_file():
        shared_tokenizer(sources, spec, folder)
        files.write_json(told, about)
    return str(folder)


def _open(word: str, tokenizer: str, count: int, quiet: bool) -> Corpus:
    if _tales(word):
        data = DataConfig(corpus="tales", dialect=_dialect(word), tokenizer=tokenizer, count=count)
        return open_corpus(data, ALONE, quiet=quiet)
    if (Path(word).expanduser() / MANIFEST).is_file():
        return checked(Corpus(Path(word).expanduser()))
    return open_corpus(DataConfig(corpus=word, tokenizer=tokenizer), ALONE, quiet=quiet)


def _tales(word: str) -> bool:
    return word == "tales" or word.startswith("tales:")


def _dialect(word: str) -> str | None:
    return word.partition(":")[2] or None


def corpus_names(one: Corpus, two: Corpus) -> tuple[str, str]:
    """Short names to tell two corpora apart: dialects of the tales, else what they were made from, else folders."""
    named = [c.manifest.get("source", {}).get("dialect") or c.name for c in (one, two)]
    if named[0] == named[1]:
        named = [one.folder.name, two.folder.name]
    return str(named[0]), str(named[1])


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
