"""`stepformer finetune`: what is forgotten of one corpus while another is learned."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, UnknownNameError
from stepformer.base.files import write_json, write_text
from stepformer.base.plugins import lasting
from stepformer.catalogue.recipes import recipe_names
from stepformer.cli.main import first_rank
from stepformer.cli.options import CONFIDENCE, JOBS, NO_DISPLAY, command, drawn, fields_help, option, tell_failed
from stepformer.cli.show import console
from stepformer.data.corpus import Corpus
from stepformer.study import finetune_study
from stepformer.study.forgetting import Direction, Finetuned, forgetting
from stepformer.study.plots import plot_forgetting
from stepformer.study.study import Planned, carry_out, plan, refuse_seed, seeds_of
from stepformer.study.tables import forgetting_details, forgetting_record, forgetting_table
from stepformer.training import RunConfig, run_config
from stepformer.training.finetuning import FinetuneConfig

# What a preset alone is pretrained with here: minutes on a laptop for a whole study, well past the unigram entropy.
PRETRAIN = ("steps=200", "batch=16", "eval_tokens=16384")


def run_finetune(args: argparse.Namespace) -> int:
    # argparse gives words after `--pretrain a b` and `--corpora c d` to these options
    listed = [[*(args.names or [])], [*(args.pretrain or [])], [*(args.corpora or [])]]
    words = [word for part in listed for word in part if _is_setting(word)]
    refuse_seed(*(word.partition("=")[0] for word in words))
    names, pretrain, corpora = ([word for word in part if not _is_setting(word)] for part in listed)
    if args.pretrain is not None:
        if names or args.on or args.source:
            raise InputError("--pretrain makes its own runs: give --corpora A B, and no RUN, --on or --source.")
        return Study(args).both_directions(pretrain, corpora, words)
    if args.corpora is not None or args.seeds is not None:
        raise InputError("--corpora and --seeds belong to --pretrain; runs are fine-tuned with --on CORPUS.")
    if not names or not args.on:
        raise InputError(
            "Name pretrained runs and a target, e.g. `stepformer finetune runs/NAME --on tales:space`, or "
            "--pretrain and --corpora."
        )
    return Study(args).one_direction(names, words)


def _is_setting(word: str) -> bool:
    """Whether a word is key=value; a folder may have an equals sign in its name too."""
    return "=" in word and not Path(word).is_dir()


class Study:
    """One call of the command: carries out plans and remembers what failed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.failed, self.plugins = args, False, list(args.plugin)

    def one_direction(self, names: Sequence[str], words: Sequence[str]) -> int:
        args, settings = self.args, finetune_study.finetune_settings(words, native=self.args.native)
        runs = [finetune_study.open_pretrained(name, args.source, quiet=args.quiet) for name in names]
        corpus = finetune_study.target_corpus(args.on, runs[0], quiet=args.quiet)
        pair = finetune_study.corpus_names(runs[0].corpus, corpus)
        labels = list(dict.fromkeys(run.label for run in runs))
        native = "-native" if settings.native else ""
        out = Path(args.out or f"runs/finetune-{pair[0]}-{pair[1]}-{'-'.join(labels)[:60]}{native}")
        baseline = self._baseline(labels)
        return self._present(*self._finetune(out, runs, corpus, pair, settings, baseline), out, "forgetting")

    def both_directions(self, names: Sequence[str], corpora: Sequence[str], words: Sequence[str]) -> int:
        args = self.args
        for_pretraining, for_corpora, for_finetuning = finetune_study.divided_words(words)
        settings = finetune_study.finetune_settings(for_finetuning, native=args.native)
        labels = [Path(name).stem if name.endswith(".toml") else name for name in names]
        if not labels or len(set(labels)) < len(labels):
            raise InputError("Name different architectures after --pretrain, e.g. --pretrain vanilla yurii.")
        baseline, seeds = self._baseline(labels), seeds_of(args.seeds or "1")
        for name in names:
            _variant(name, for_pretraining, None)  # complains before anything is prepared
        joined = "-".join([*(Path(word).name.replace(":", "-") for word in corpora), *labels])
        out = Path(args.out or f"runs/finetune-{joined[:80]}")
        found = finetune_study.two_corpora(corpora, out, for_corpora, quiet=args.quiet)
        short = finetune_study.corpus_names(*found)
        pretrained = []
        for corpus, called in zip(found, short, strict=True):
            made = {label: _variant(name, for_pretraining, corpus) for label, name in zip(labels, names, strict=True)}
            runs = plan(out / f"pretrain-{called}", made, seeds, quiet=args.quiet)
            pretrained.append([finetune_study.open_pretrained(folder) for folder in self._carry_out(runs)])
        native = "-native" if settings.native else ""
        directions, settled = list[Direction](), settings
        for source, target in ((0, 1), (1, 0)):
            if pretrained[source]:
                pair = (short[source], short[target])
                folder = out / f"{pair[0]}-to-{pair[1]}{native}"
                one, settled = self._finetune(folder, pretrained[source], found[target], pair, settings, baseline)
                if one:
                    write_json(folder / "forgetting.json", forgetting_record(one, settled.to_dict()))
                directions += one
        return self._present(directions, settled, out, f"forgetting{native}")

    def _baseline(self, labels: Sequence[str]) -> str:
        baseline: str = self.args.baseline or ("vanilla" if "vanilla" in labels else labels[0])
        if baseline not in labels:
            raise UnknownNameError(f"The baseline '{baseline}' is not among {', '.join(labels)}.")
        return baseline

    def _finetune(
        self,
        out: Path,
        runs: Sequence[finetune_study.Pretrained],
        target: Corpus,
        pair: tuple[str, str],
        settings: FinetuneConfig,
        baseline: str,
    ) -> tuple[list[Direction], FinetuneConfig]:
        """What the runs forget in one direction, if any run of the baseline finished; and the settings of all."""
        theirs = [plugin for run in runs for plugin in run.record.get("plugins", [])]
        self.plugins = lasting([*self.plugins, *theirs])
        planned, settled = finetune_study.plan_finetuning(out, runs, target, settings, quiet=self.args.quiet)
        finished = [Finetuned.load(folder) for folder in self._carry_out(planned)]
        if not any(run.label == baseline for run in finished):
            return [], settled
        return [forgetting(finished, *pair, baseline, self.args.confidence)], settled

    def _carry_out(self, runs: Sequence[Planned]) -> list[Path]:
        """Folders of the runs that finished; a sentence for each that did not."""
        finished, failed = carry_out(runs, jobs=self.args.jobs, quiet=self.args.quiet, plugins=self.plugins)
        self.failed |= tell_failed(failed)
        return finished

    def _present(self, directions: Sequence[Direction], settings: FinetuneConfig, out: Path, name: str) -> int:
        if not directions:
            print("stepformer: no run of the baseline finished: nothing to compare with", file=sys.stderr)
            return 1
        if not first_rank():
            return int(self.failed)
        table = forgetting_table(directions)
        console().print(table)
        words, details, record, picture = (out / f"{name}.{ending}" for ending in ("md", "csv", "json", "png"))
        write_text(words, table.markdown())
        write_text(details, forgetting_details(directions).csv())
        write_json(record, forgetting_record(directions, settings.to_dict()))
        made = [words, details, record, *drawn(plot_forgetting, directions, picture)]
        print(f"written: {', '.join(map(str, made))}")
        return int(self.failed)


def _variant(name: str, words: Sequence[str], corpus: Corpus | None) -> RunConfig:
    """The pretraining run of a name on a corpus; a preset alone gets a length for laptops."""
    usual = () if name.endswith(".toml") or name in recipe_names() else PRETRAIN
    given: dict[str, Any] = {} if corpus is None else {"data.corpus": str(corpus.folder)}
    return run_config(name, [*usual, *words], **given)


add_finetune = command(
    run_finetune,
    option("names RUN | key=value", "pretrained runs; settings to change", nargs="*"),
    option("--on CORPUS", "fine-tune the runs on it: a prepared folder, or tales:DIALECT"),
    option("--source CORPUS", "what imported runs were trained on, or where a moved corpus is now"),
    option("--pretrain NAME", "instead of RUNs: pretrain these on both corpora", nargs="+"),
    option("--corpora CORPUS", "with --pretrain: the two corpora", nargs="+"),
    option("--seeds N|a,b,c", "with --pretrain: how many seeds (from 42 on), or which (1)"),
    option("--native", "each run's own optimizer at a sixth of its rates"),
    option("--baseline NAME", "what the others are compared with (default: vanilla, else the first)"),
    CONFIDENCE,
    option("--out DIR", "folder of all runs, tables and plot (default: runs/finetune-...)"),
    JOBS,
    NO_DISPLAY,
    settings=lambda: fields_help(FinetuneConfig, 14, with_choices=False),
    pretrain=lambda: " ".join(PRETRAIN),
)
