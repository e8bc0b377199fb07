"""The corpus a config asks for: a prepared folder, or the tales, made on the spot; and the corpus of a run again."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from stepformer.base.errors import InputError, command_line
from stepformer.base.files import sha256
from stepformer.data.corpus import MANIFEST, Corpus, corpora_folder, corpus_folder, few, is_left, read_manifest
from stepformer.data.readers import MARKDOWN
from stepformer.data.sources import DATASETS, Source, usable_files
from stepformer.data.tokenizers import load_tokenizer, tokenizer_kind
from stepformer.training.config import DataConfig, RunConfig
from stepformer.training.parallel import World
from stepformer.training.runs import Record, RunFolder

PASSAGES, PASSAGE = 16, 32  # that are looked for in a corpus, and tokens of one
SMALL = 2 << 30  # bytes up to which every checksum is compared at the start of a run
GPT2_IDS, BYTES_PER_TOKEN = 50_257, 4  # about, in English


class NotPreparedError(InputError):
    """A corpus that has to be prepared before a training; `ids` is how many it would have, as far as that is known."""

    def __init__(self, sentence: str, tokenizer: str) -> None:
        super().__init__(sentence)
        kind, argument = tokenizer_kind(tokenizer)
        self.ids = int(argument) if kind == "bpe" else {"gpt2": GPT2_IDS, "bytes": 257}.get(kind)


def open_corpus(config: DataConfig, world: World, *, quiet: bool = False) -> Corpus:
    """Open what `[data]` names. Tales are prepared when they are not there yet; anything else is asked for."""
    from stepformer.data.opening import open_source
    from stepformer.data.prepare import prepare

    is_tales = config.corpus == "tales"
    given = Path(config.corpus).expanduser()
    if (given / MANIFEST).is_file():
        return checked(Corpus(given), config.tokenizer)
    if is_left(given):
        read_manifest(given)  # says what to do
    meant = corpora_folder() / given
    if not (given.exists() or is_tales or config.corpus in DATASETS) and (meant / MANIFEST).is_file():
        word = shlex.quote(f"corpus={meant}")
        raise InputError(f"There is no corpus '{config.corpus}' here. Did you mean {word}?")
    tokenizer = config.tokenizer or ("bpe:1024" if is_tales else "gpt2")
    source = open_source(config.corpus, dialect=config.dialect, count=config.count if is_tales else None)
    folder = corpus_folder(source.name, tokenizer)
    there = (folder / MANIFEST).is_file()
    if is_tales and world.is_main:
        if not quiet and not there:
            Console(stderr=True, highlight=False).print(f"preparing {source.name} with {tokenizer} in {folder} ...")
        prepare(source, tokenizer, folder)
    if is_tales:
        world.barrier()
    elif not there:
        raise NotPreparedError(_not_prepared(config, source, tokenizer, folder), tokenizer)
    corpus = Corpus(folder)
    made_of = corpus.manifest.get("source", {})
    if not is_tales and made_of.get("kind") != source.description.get("kind"):
        raise InputError(
            f"'{folder}' was not made from '{config.corpus}' but from {made_of.get('kind', 'other data')} "
            f"'{corpus.name}': if you mean it, say {shlex.quote(f'corpus={folder}')}."
        )
    if not is_tales and other_files(made_of, source.description):
        again = command_line("prepare", config.corpus, "--tokenizer", tokenizer)
        raise InputError(
            f"'{folder}' was made from other files, or from these before they changed: run `{again} --out DIR` and say "
            f"corpus=DIR, or say {shlex.quote(f'corpus={folder}')} if you mean what is there."
        )
    return checked(corpus, config.tokenizer)


def other_files(one: Record, two: Record) -> bool:
    """Whether two sources are files of other names, sizes or checksums; large ones have none."""
    a, b = ({file["name"]: file for file in source.get("files", ())} for source in (one, two))
    if a.keys() != b.keys():
        return True
    sums = ([known.get(key) for known in (a[name], b[name])] for name in a for key in ("size", "sha256"))
    return any(None not in pair and pair[0] != pair[1] for pair in sums)


def part_of_corpus(word: str, corpus: Mapping[str, Any]) -> bool:
    """Whether a prepared corpus or files are text that a run with these facts was trained or validated on."""
    place, known = Path(word).expanduser(), Path(corpus.get("folder", "")) / MANIFEST
    if (place / MANIFEST).is_file():
        return Corpus(place).split("val").hash in [split["hash"] for split in corpus.get("splits", {}).values()]
    source = read_manifest(known.parent)["source"] if corpus and known.is_file() else {}
    sums = [file.get("sha256") for file in source.get("files", ())]
    parts = usable_files(place, MARKDOWN) if place.is_dir() else [place] if place.is_file() else []
    return bool(sums) and any(sha256(part) in sums for part in parts)


def shares_passages(tokens: NDArray[np.integer], corpus: Mapping[str, Any]) -> bool:
    """Whether most of some passages of a text stand in a run's corpus too, in whatever files it came; a large one is
    not searched, and one that is gone has none."""
    if not is_there(corpus):
        return False
    there = Corpus(corpus["folder"])
    if _size(there) > SMALL or len(tokens) < PASSAGE:
        return False
    starts = np.unique(np.linspace(0, len(tokens) - PASSAGE, PASSAGES).astype(np.int64))
    splits = [there.split(name) for name in there.manifest["splits"]]
    found = sum(any(split.holds(tokens[start : start + PASSAGE]) for split in splits) for start in starts)
    return 2 * found > len(starts)


def corpora_of(record: Mapping[str, Any]) -> list[Record]:
    """The corpora that a run with this record was trained or validated on, and before it the run that its weights are
    from, if that is still there.
    """
    found = [record["corpus"], *record.get("also", {}).values()] if record.get("corpus") else []
    if found and "config" in record:  # of a run, not of one that is going to be
        found[0] = {**found[0], "folder": str(place_of(found[0], record["config"]["data"]["corpus"]))}
    before = RunFolder(Path(record["init"]["run"]).expanduser()) if record.get("init") else None
    return [*found, *(corpora_of(before.read()) if before and before.exists else [])]


def _not_prepared(config: DataConfig, source: Source, tokenizer: str, folder: Path) -> str:
    """What to do before a training: prepare the corpus, or name what was prepared of it with another tokenizer."""
    missing, length = f"The corpus '{config.corpus}' is not prepared", source.approximate_bytes
    if config.tokenizer is None:
        alike = sorted(folder.parent.glob(f"{glob.escape(folder.name.removesuffix(tokenizer))}*/{MANIFEST}"))
        prepared = [corpus for corpus in (Corpus(path.parent) for path in alike) if corpus.name == source.name]
        for current in (True, False):
            found = [c for c in prepared if current != other_files(c.manifest.get("source", {}), source.description)]
            names = ", ".join(corpus.manifest["tokenizer"]["name"] for corpus in found)
            words = " or ".join(shlex.quote(f"corpus={corpus.folder}") for corpus in found)
            if found and current:
                return f"{missing} with the tokenizer {tokenizer}, but it is with {names}: say {words}."
            if found:
                again = command_line("prepare", config.corpus, "--tokenizer", names.split(", ")[0], "--force")
                return f"{missing}; before its files changed it was, with {names}: run `{again}`, or say {words}."
        if length is not None and few(length / BYTES_PER_TOKEN, GPT2_IDS):
            how = command_line("prepare", config.corpus, "--tokenizer", "bpe:1024")
            then = shlex.quote(f"corpus={corpus_folder(source.name, 'bpe:1024')}")
            return f"{missing}, and it is short for GPT-2's {GPT2_IDS:,} ids: run `{how}` first, then say {then}."
    how = command_line("prepare", config.corpus, "--tokenizer", tokenizer)
    return f"{missing} (no '{folder / MANIFEST}'): run `{how}` first."


def open_also(folders: str | None, beside: Corpus) -> dict[str, Corpus]:
    """The other corpora that `[data] also` names, by the names of their folders; they share the run's tokenizer."""
    found: dict[str, Corpus] = {}
    for word in filter(None, map(str.strip, (folders or "").split(","))):
        corpus = checked(Corpus(Path(word).expanduser()))
        name = corpus.folder.resolve().name
        if name in found:
            raise InputError(f"[data] also names two corpora whose folders are called '{name}': rename one of them.")
        check_tokenizers(corpus, beside)
        found[name] = corpus
    return found


def check_tokenizers(corpus: Corpus, beside: Corpus) -> None:
    """Two corpora that one model reads must be made with one tokenizer."""
    one, two = corpus.manifest["tokenizer"], beside.manifest["tokenizer"]
    if one["fingerprint"] != two["fingerprint"]:
        raise InputError(
            f"The tokens of '{corpus.folder}' were made by another tokenizer ({one['name']}, fingerprint "
            f"{one['fingerprint']}) than those of '{beside.folder}' ({two['name']}, {two['fingerprint']}): prepare it "
            f"again with `{command_line('prepare', 'SOURCE', '--tokenizer', beside.folder)}`."
        )


def checked(corpus: Corpus, tokenizer: str | None = None) -> Corpus:
    """Compare checksums where that takes seconds, and the tokenizer with the one asked for."""
    name = str(corpus.manifest["tokenizer"]["name"])
    asked = tokenizer or name
    if tokenizer is not None and tokenizer_kind(tokenizer)[0] == "folder":
        corpus.check_tokenizer(load_tokenizer(tokenizer_kind(tokenizer)[1]))
        asked = name
    if asked.partition(":")[0] != name.partition(":")[0] or (asked.startswith("bpe") and asked != name):
        made = f"the corpus '{corpus.folder}' was prepared with '{name}'"
        raise InputError(f"[data] tokenizer = '{tokenizer}', but {made}.")
    if _size(corpus) <= SMALL and (there := _stamps(corpus.folder)) not in _VERIFIED:
        corpus.verify()
        _VERIFIED.add(there)
    return corpus


def _size(corpus: Corpus) -> int:
    return sum(shard["bytes"] for split in corpus.manifest["splits"].values() for shard in split["shards"])


_VERIFIED: set[tuple[tuple[str, int, int, int], ...]] = set()  # a study opens its corpus for every run


def _stamps(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Every file of a corpus as the disk knows it: what writes into one changes its stamp."""
    found = ((path.resolve(), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((str(path), stat.st_ino, stat.st_size, stat.st_ctime_ns) for path, stat in found)


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    splits = {name: {"hash": corpus.split(name).hash, "tokens": len(corpus.split(name))} for name in ("train", "val")}
    return {"folder": str(corpus.folder.resolve()), "tokenizer": corpus.manifest["tokenizer"], "splits": splits}


def same_corpus(facts: Record, folder: RunFolder, config: RunConfig, world: World, moved: str | Path | None) -> Corpus:
    """The corpus that the run was trained on, where it was or where it is now; other tokens are refused."""
    where = Path(moved) if moved else place_of(facts, config.data.corpus)
    if not where.is_dir() and moved is None and config.data.corpus == "tales":
        where = open_corpus(config.data, world, quiet=True).folder  # made again
    if not where.is_dir():
        here = "say where it is with corpus=DIR (for `eval` --corpus DIR, for `finetune` --source DIR)"
        raise InputError(f"The corpus of '{folder.path}' is not in '{where}': {here}.")
    return _same(where, facts, f"The run '{folder.path}' was trained on other data")


def place_of(facts: Record, word: str) -> Path:
    """Where a run's corpus was, or where the run's config says from here, if a whole project was moved."""
    where, here = Path(facts["folder"]), Path(word)
    if where.is_dir() or not (here / MANIFEST).is_file():
        return where
    splits = ((Corpus(here).split(name).hash, known["hash"]) for name, known in facts["splits"].items())
    return here if all(found == known for found, known in splits) else where


def is_there(corpus: Mapping[str, Any]) -> bool:
    """Whether the corpus with these facts can still be searched."""
    return (Path(corpus.get("folder", "")) / MANIFEST).is_file()


def same_also(facts: dict[str, Any], folder: RunFolder, corpus: Corpus, moved: str | None) -> dict[str, Corpus]:
    """The other corpora that the run is evaluated on, where they were or where they are now."""
    places = [p.strip() for p in moved.split(",")] if moved else [known["folder"] for known in facts.values()]
    if len(places) != len(facts):
        raise InputError(f"'{folder.path}' is evaluated on {len(facts)} other corpora, but also names {len(places)}.")
    found = {}
    for (name, known), place in zip(facts.items(), places, strict=True):
        where = Path(place)
        if not where.is_dir():
            what = f"'{folder.path}' is evaluated on a second corpus, which is not in '{where}'"
            raise InputError(f"{what}: say where it is with also=DIR.")
        found[name] = _same(where, known, f"The run '{folder.path}' was evaluated on other data", corpus)
    return found


def _same(where: Path, facts: dict[str, Any], other: str, beside: Corpus | None = None) -> Corpus:
    corpus = checked(Corpus(where))
    if beside is not None:
        check_tokenizers(corpus, beside)
    for name, known in facts["splits"].items():
        found = corpus.split(name).hash
        if found != known["hash"]:
            raise InputError(f"{other}: the {name} split of '{corpus.folder}' has hash {found}, not {known['hash']}.")
    return corpus
