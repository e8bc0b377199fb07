"""Texts that nothing was chosen by: when all runs are finished, the final weights of each are evaluated on them, once.

RUN/measured/held-out.json keeps what was found with the hash of the text; whoever asks again is told the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepformer.base import documents
from stepformer.base.errors import InputError
from stepformer.base.progress import say
from stepformer.data.tokenizers import Tokenizer
from stepformer.measure import measured
from stepformer.measure.evaluation import Reading, Text, open_text, perplexity
from stepformer.measure.evaluation.scoring import about_run, scorer_of
from stepformer.measure.evaluation.tasks import data_folder
from stepformer.measure.evaluation.texts import token_hash
from stepformer.present.tables import listed
from stepformer.study import statistics
from stepformer.study.records import HeldOutRows, Matched, RunRecord, matched_words
from stepformer.training.corpora import corpora_of, part_of_corpus, shares_passages
from stepformer.training.loading import load_run
from stepformer.training.runs import RunFolder
from stepformer.training.stopping import Stopped, Watch

KIND = "held-out"
FEW_TOKENS = 10_000  # of a text: half a nat from token to token leaves 0.005 in their mean


@dataclass
class HeldOut:
    """A text with what was found of every run, by its folder, and why nothing was of others."""

    name: str
    found: dict[Path, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rows(
        self,
        runs: Mapping[str, Mapping[int, RunRecord]],
        baseline: str,
        confidence: float,
        matches: Mapping[str, tuple[str, str]],
    ) -> HeldOutRows:
        """Losses and paired differences of labelled runs, also to baselines of equal size (`Facts.matches`); runs that
        were read in other ways are refused.
        """
        first: dict[str, Any] = next(iter(self.found.values()), {"tokens": 0, "hash": ""})
        for folder, entry in self.found.items():
            if (entry["tokens"], entry["hash"]) != (first["tokens"], first["hash"]):
                raise InputError(f"'{folder}' and others read different tokens of '{self.name}': leave it out.")
        precisions = sorted({entry["precision"] for entry in self.found.values()})
        mixed = [f"The runs were evaluated in {' and '.join(precisions)}."] if len(precisions) > 1 else []
        losses = {
            label: {seed: self.found[run.folder]["nats"] for seed, run in some.items() if run.folder in self.found}
            for label, some in runs.items()
        }
        base = losses[baseline]
        differences = {
            label: statistics.paired(base, some, confidence)
            for label, some in losses.items()
            if label != baseline and base.keys() & some.keys()
        }
        matched, said = dict[str, Matched](), list[str]()
        for label, difference in differences.items():
            said += [f"* {note}" for note in statistics.too_small(label, difference)]
            what, other = matches.get(label, ("", ""))
            if losses.get(other, {}).keys() & losses[label].keys():
                matched[label] = (what, other, statistics.paired(losses[other], losses[label], confidence))
                if other != baseline:
                    said.append(f"{matched_words(label, matched[label])}.")
        second = [found for _, other, found in matched.values() if other != baseline]
        several = statistics.several_intervals([*differences.values(), *second], confidence)
        tokens, few = first["tokens"], list[str]()
        if differences and tokens < FEW_TOKENS:
            alone = "the intervals are over seeds alone, and another such text may order the rows otherwise"
            few = [f"{tokens:,} tokens are few (under {FEW_TOKENS:,}): {alone}."]
        names = [run.folder.name for some in runs.values() for run in some.values() if run.folder not in self.found]
        left = [name for name in names if not any(note.startswith(f"{name} is not") for note in self.notes)]
        unread = [f"Not evaluated on it: {listed(left)}; --held-out with this text does that."] if left else []
        notes = (*self.notes, *unread, *mixed, *few, *said, *several)
        return HeldOutRows(self.name, tokens, first["hash"], losses, differences, matched, notes)


def open_held_out(
    words: Sequence[str], tokenizer: Tokenizer, context: int, records: Sequence[Mapping[str, Any]] = ()
) -> list[Text]:
    """The texts that words name, as `eval --on` takes them; refused is what cannot be read or told apart, or is a part
    of a corpus of the runs that these are records of.
    """
    if words and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("--held-out is for one process: let torchrun train, then give the same command without it.")
    corpora = {str(corpus.get("folder")): corpus for record in records for corpus in corpora_of(record)}
    data, texts = data_folder(None), []
    for word in dict.fromkeys(words):
        known = any(part_of_corpus(word, corpus) for corpus in corpora.values())
        if not known:
            here = data if data and (data / word).is_dir() else None  # else from the Hub
            texts.append(open_text(word, tokenizer, data=here))
            known = any(shares_passages(texts[-1].tokens, corpus) for corpus in corpora.values())
        if known:  # whose losses were looked at, or trained on
            raise InputError(f"--held-out {word} is a part of the corpus that the runs train on or are validated on.")
    for number, text in enumerate(texts):
        Reading().windows(text, context)  # what is too short is said at once
        if text.name in [other.name for other in texts[:number]]:
            raise InputError(f"Two held-out texts are called '{text.name}': rename one of them.")
    return texts


def evaluate_held_out(
    folders: Sequence[Path], words: Sequence[str], *, quiet: bool = False, watch: Watch | None = None
) -> list[HeldOut]:
    """What finished runs make of texts: as it was found before, or found now and kept.

    Texts that they were evaluated on before come after those that words name: to leave one out would be a choice.
    """
    texts: dict[str, list[Text]] = {}  # by tokenizer
    found: dict[str, HeldOut] = {}
    before: dict[Path, list[dict[str, Any]]] = {}
    with watch or Watch() as watch:
        for number, folder in enumerate(folders):
            named, device = dict[str, Text](), ""
            if words:  # else no rule of one's own needs to be imported
                run = RunFolder(folder)
                config, tokenizer = run.config(), run.read_tokenizer(run.read())
                device = config.train.device
                if tokenizer.fingerprint not in texts:
                    records = [RunFolder(other).read() for other in folders]
                    texts[tokenizer.fingerprint] = open_held_out(words, tokenizer, config.model.context, records)
                named = {token_hash(text.tokens): text for text in texts[tokenizer.fingerprint]}
            kept = measured.load(folder, KIND)
            entries: list[dict[str, Any]] = kept["result"]["texts"] if kept else []
            missing = {key: text for key, text in named.items() if key not in [entry["text"] for entry in entries]}
            try:
                if missing:
                    entries = [*entries, *_evaluated(folder, device, missing, entries, quiet, watch)]
            except Stopped as stopped:
                stopped.add_note(f"{number} of {len(folders)} runs are evaluated on the held-out texts")
                raise
            except InputError as error:  # its weights are gone
                for text in missing.values():
                    _of(found, text).notes.append(f"{folder.name} is not evaluated on {text.name}: {error}")
            for entry in entries:
                if entry["text"] in named:
                    _of(found, named[entry["text"]]).found[folder] = entry
            before[folder] = [entry for entry in entries if entry["text"] not in named]
    return [*found.values(), *kept_held_out(before, [*found])]


def kept_held_out(kept: Mapping[Path, Sequence[dict[str, Any]]], taken: Sequence[str] = ()) -> list[HeldOut]:
    """What is in held-out.json of runs, by their folders; texts of one name that differ, from each other or from one
    whose name is taken, have their hash in it.
    """
    texts = dict.fromkeys((entry["name"], entry["hash"]) for entries in kept.values() for entry in entries)
    names = [*taken, *(name for name, _ in texts)]
    found = []
    for name, key in texts:
        text = HeldOut(f"{name} {key}" if names.count(name) > 1 else name)
        for folder, entry in ((folder, entry) for folder, entries in kept.items() for entry in entries):
            if (entry["name"], entry["hash"]) == (name, key):
                text.found[folder] = entry
        found.append(text)
    return found


def _of(found: dict[str, HeldOut], text: Text) -> HeldOut:
    return found.setdefault(text.name, HeldOut(text.name))


class _Watched(measured.Journal):
    """A journal that ends between two of its pieces, which stay, when it is asked to."""

    def __init__(self, path: Path, about: Mapping[str, Any], watch: Watch) -> None:
        super().__init__(path, about)
        self.watch = watch

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.pieces and self.watch.asked():
            raise Stopped(self.watch.asked(), None, Path())
        return super().get(name, compute)


def _evaluated(
    folder: Path,
    device: str,
    texts: Mapping[str, Text],
    kept: Sequence[dict[str, Any]],
    quiet: bool,
    watch: Watch,
) -> list[dict[str, Any]]:
    """The losses of a run's final weights, kept beside those of other texts."""
    run = load_run(folder, "last", device)
    about = about_run(run)
    if about["weights"] != documents.read(run.folder.result, documents.RESULT)["weights_sha256"]:
        raise InputError(f"The last checkpoint of '{folder}' does not have the weights of its result.")
    found, notes = [], _Watched(folder / measured.FOLDER / f"{KIND}.jsonl", about, watch)
    for key, text in texts.items():
        say(f"{folder.name} is evaluated on {text.name}", quiet=quiet)
        windows = Reading().windows(text, run.model.config.context)
        nats = perplexity.total_nats(scorer_of(run), text, windows, notes)
        entry = perplexity.entry_of(text, Reading(), windows, nats, run)
        found.append({**entry, "text": key, "precision": about["precision"]})
    measured.save(folder, KIND, step=run.step, settings=about, result={"texts": [*kept, *found]})
    notes.close_used()
    return found
