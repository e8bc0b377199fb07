"""The corpus a config asks for: a prepared folder, or the tales, which are made on the spot."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from stepformer.base.errors import InputError, command_line
from stepformer.data.corpus import MANIFEST, Corpus, corpus_folder, few
from stepformer.data.sources import Source
from stepformer.data.tokenizers import load_tokenizer, tokenizer_kind
from stepformer.training.config import DataConfig
from stepformer.training.parallel import World

SMALL = 2 << 30  # bytes up to which every checksum is compared at the start of a run
GPT2_IDS, BYTES_PER_TOKEN = 50_257, 4  # about, in English


def open_corpus(config: DataConfig, world: World, *, quiet: bool = False) -> Corpus:
    """Open what `[data]` names. Tales are prepared when they are not there yet; anything else is asked for."""
    from stepformer.data.opening import open_source
    from stepformer.data.prepare import prepare

    is_tales = config.corpus == "tales"
    given = Path(config.corpus).expanduser()
    if (given / MANIFEST).is_file():
        return checked(Corpus(given), config.tokenizer)
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
        raise InputError(_not_prepared(config, source, tokenizer, folder))
    corpus = Corpus(folder)
    made_of = corpus.manifest.get("source", {})
    if not is_tales and made_of.get("kind") != source.description.get("kind"):
        raise InputError(
            f"'{folder}' was not made from '{config.corpus}' but from {made_of.get('kind', 'other data')} "
            f"'{corpus.name}': if you mean it, say {shlex.quote(f'corpus={folder}')}."
        )
    return checked(corpus, config.tokenizer)


def _not_prepared(config: DataConfig, source: Source, tokenizer: str, folder: Path) -> str:
    """What to do before a training: prepare the corpus, or name what was prepared of it with another tokenizer."""
    missing, length = f"The corpus '{config.corpus}' is not prepared", source.approximate_bytes
    if config.tokenizer is None:
        for other in (path.parent for path in sorted(folder.parent.glob(f"*/{MANIFEST}"))):
            alike = other.name.startswith(folder.name.removesuffix(tokenizer))
            if alike and (made := Corpus(other)).name == source.name:
                name, word = made.manifest["tokenizer"]["name"], shlex.quote(f"corpus={other}")
                return f"{missing} with the tokenizer {tokenizer}, but it is with {name}: say {word}."
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
    size = sum(shard["bytes"] for split in corpus.manifest["splits"].values() for shard in split["shards"])
    if size <= SMALL:
        corpus.verify()
    return corpus
