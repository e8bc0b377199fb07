"""The ledger of claims: every number is in its raw file, every verdict follows from the numbers."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import forked
from scripts import script
from stepformer.base.errors import InputError
from stepformer.cli import claims as command
from stepformer.cli.main import main, parser
from stepformer.study import compare, ledger
from stepformer.study.ledger import Criterion, Measured, Source, changed, read_numbers
from study.test_comparing import runs

ROOT = Path(__file__).resolve().parents[2]
SOURCES, CLAIMS = ledger._read()
T = {3: 4.302653, 4: 3.182446}  # Student's t at 97.5 %, by pairs


def copy_of_raw(folder: Path) -> Path:
    for name in {name for source in SOURCES.values() for name in source.raw}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def verdicts(numbers: Any = None) -> dict[int, str]:
    return {claim.number: claim.verdict for claim in ledger.ledger(numbers)}


def test_every_row_has_its_raw_file_and_its_numbers_are_found_in_it() -> None:
    assert [claim.number for claim in CLAIMS] == list(range(1, 27))
    used = {name for claim in CLAIMS for part in claim.parts for name in part.sources}
    assert used == set(SOURCES)
    for source in SOURCES.values():
        for name in source.raw:
            assert (ROOT / name).is_file(), name
        assert source.commands, source.name
        assert source.rows(ROOT), source.name
    assert changed(ROOT) == [], "run `python docs/claims_page.py`"


def test_the_page_is_made_of_what_there_is() -> None:
    module = script("docs/claims_page.py")
    assert (ROOT / "docs/claims.md").read_text() == module.page(ledger.ledger()), "run `python docs/claims_page.py`"
    assert (ROOT / "docs/figures/claims.png").is_file()


def test_scales_are_those_of_the_files() -> None:
    for source in SOURCES.values():
        row = next((row for row in source.rows(ROOT) if row[source.label] == source.baseline), {})
        if "train_tokens" in row:
            assert (int(row["parameters"]), int(row["train_tokens"])) == (source.parameters, source.tokens)


def test_verdicts_follow_by_another_way() -> None:
    """By hand from the files: two parts that decide a claim together, and those of the tales by seed."""
    with (ROOT / "docs/raw/2026-11-sharpness/runs.csv").open() as file:
        loss = {(row["architecture"], row["seed"]): float(row["val_loss"]) for row in csv.DictReader(file)}
    apart = [loss["tmm", seed] - loss["vanilla", seed] for seed in ("42", "43", "44")]
    mean = sum(apart) / 3
    half = T[3] * math.sqrt(sum((x - mean) ** 2 for x in apart) / 2 / 3)
    part = next(part for part in ledger.ledger()[7].parts if part.test == "tmm - vanilla < 0")
    largest, smaller = part.evidence[:2]
    found = smaller.measured
    assert (found.n, found.mean, found.low, found.high) == pytest.approx((3, mean, mean - half, mean + half), rel=1e-4)
    assert mean - half > 0
    assert smaller.verdict == "refuted"
    with (ROOT / "docs/raw/2026-11-recipe/proof-rows-to-vanilla.csv").open() as file:
        loss = {row["architecture"]: [float(x) for x in row["loss_by_seed"].split()] for row in csv.DictReader(file)}
    apart = [x - y for x, y in zip(loss["tmm"], loss["vanilla"], strict=True)]
    mean = sum(apart) / 3
    half = T[3] * math.sqrt(sum((x - mean) ** 2 for x in apart) / 2 / 3)
    found = largest.measured
    assert (found.n, found.low, found.high) == pytest.approx((3, mean - half, mean + half), rel=1e-3)
    assert found.mean == pytest.approx(mean, abs=1e-6)  # the file has six digits
    assert mean - half < 0 < mean + half
    assert (part.verdict, ledger.ledger()[7].verdict) == ("open", "open")  # more tokens than the smaller run

    text = (ROOT / "docs/raw/2026-11-tales-comparison/terminal.txt").read_text().split("final losses by seed")[1]
    rows = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in text.splitlines()[1:6]}
    apart = [x - y for x, y in zip(rows["hb"], rows["adam"], strict=True)]
    mean = sum(apart) / 4
    half = T[4] * math.sqrt(sum((x - mean) ** 2 for x in apart) / 3 / 4)
    part = next(part for part in ledger.ledger()[9].parts if part.test == "hb - adam < 0")
    found = next(one.measured for one in part.evidence if one.source.name == "tales-2M")
    assert (found.n, found.mean, found.low, found.high) == pytest.approx((4, mean, mean - half, mean + half), rel=1e-4)
    assert (part.verdict, ledger.ledger()[9].verdict) == ("confirmed", "open")  # other parts were never measured


@pytest.mark.parametrize(
    ("test", "measured", "verdict"),
    [
        ("a - b < 0", (4, -0.02, -0.03, -0.01), "confirmed"),
        ("a - b < 0", (4, 0.02, 0.01, 0.03), "refuted"),
        ("a - b < 0", (4, -0.01, -0.03, 0.01), "open"),
        ("a - b > 0", (4, 0.02, 0.01, 0.03), "confirmed"),
        ("a - b < 0", (1, -5.0, None, None), "open"),  # one seed never confirms
        ("a - b < 0", (3, -0.002, -0.0021, -0.0019), "open"),  # too small for three pairs
        ("a - b < 0", (4, -0.002, -0.0021, -0.0019), "confirmed"),
        ("a / b in 0.4..0.6", (3, 0.5, 0.45, 0.55), "confirmed"),
        ("a / b in 0.4..0.6", (3, 0.38, 0.37, 0.41), "open"),
        ("a / b in 0.4..0.6", (3, 0.3, 0.2, 0.39), "refuted"),
        ("every row < 1e-12", (9, 3e-15, 1e-16, 3e-15), "confirmed"),
        ("every row < 1e-12", (9, 3e-11, 1e-16, 3e-11), "open"),
    ],
)
def test_rule_of_the_verdict(test: str, measured: tuple[Any, ...], verdict: str) -> None:
    assert Criterion.parse(test).verdict(Measured(*measured), "loss") == verdict


def test_parts_and_scales_together() -> None:
    assert ledger.together([]) == "open"
    assert ledger.together(["confirmed", "open"]) == "open"
    assert ledger.together(["confirmed", "refuted", "open"]) == "refuted"
    assert ledger.together(["confirmed", "confirmed"]) == "confirmed"
    for claim in ledger.ledger():
        for part in claim.parts:
            work = [found.source.work for found in part.evidence]
            assert work == sorted(work, reverse=True)
            assert all(found.source.work == work[0] for found in part.decisive)
        if claim.verdict == "confirmed":  # in all its parts, so that of the smallest scale is what it holds at
            assert claim.deciding
            least = min(part.evidence[0].source.work for part in claim.counted)
            assert claim.deciding.evidence[0].source.work == least


def test_terms_of_a_test() -> None:
    assert Criterion.parse("wide - 0.5 vanilla - 0.5 tmm-zero > 0").terms == (
        (1, "wide"),
        (-0.5, "vanilla"),
        (-0.5, "tmm-zero"),
    )
    assert Criterion.parse("(a - b) / noise in 11.25..18.75") == Criterion("noise", ((1, "a"), (-1, "b")), 11.25, 18.75)
    assert Criterion.parse("a / b > 0.97") == Criterion("ratio", ((1, "a"), (-1, "b")), 0.97, math.inf)
    assert Criterion.parse("s - t in -0.0256..-0.0154").high == -0.0154
    with pytest.raises(InputError, match="is no test"):
        Criterion.parse("a is better than b")


def test_a_changed_raw_number_is_noticed(tmp_path: Path) -> None:
    """One digit of one number of every source; and a loss that turns a verdict."""
    root = copy_of_raw(tmp_path)
    assert changed(root) == []
    nesterov = """v' = LN_v(beta v + gamma g(x + mu v));  x' = x + v'",\n    "calls": {\n      """
    digits = {
        "tales-200k": ("[-0.3807,", "[-0.3907,"),
        "tales-2M": ("yurii   0.4460", "yurii   0.4461"),
        "tales-2M-matched": ("-0.027709", "-0.027609"),
        "tales-geometries": ("-0.026821", "-0.025821"),
        "tales-symp": ("+0.075763", "+0.065763"),
        "mix-33M": ("4.41882", "4.41982"),
        "mix-25M": ("4.421411", "4.421511"),
        "proof-50M": ("4.239517 4.237572", "4.239617 4.237572"),
        "trust-50M": ("4.277371 4.272947", "4.277471 4.272947"),
        "trust-kl-50M": ("4.352820 4.346643", "4.352920 4.346643"),
        "trust-entropy-50M": ("4.443606 4.422132", "4.443706 4.422132"),
        "dialects": ("vanilla  42  0.6094", "vanilla  42  0.6194"),
        "dialects-back": ("vanilla  42  0.6558", "vanilla  42  0.6658"),
        "mix-stories": ("-0.0932 less", "-0.0832 less"),
        "speed": ("562232.83", "462232.83"),
        "speed-targets": ("580695.23", "480695.23"),
        "calls": (f'{nesterov}"attn": 1', f'{nesterov}"attn": 2'),
        "flow-linear": ("0.203085", "0.303085"),
        "flow-softmax": ("2.00678", "3.00678"),
        "flow-ellipse": ("3.00919e-15", "3.00919e-11"),
        "audit": ("fd 6e-10, tr 2e-15", "fd 6e-10, tr 2e-10"),
    }
    assert set(digits) == set(SOURCES)
    for name, (old, new) in digits.items():
        path = root / SOURCES[name].raw[0]
        text = path.read_text()
        assert old in text, name
        path.write_text(text.replace(old, new))
        assert any(name in sentence for sentence in changed(root)), name
        path.write_text(text)
    path = root / SOURCES["proof-50M"].raw[0]
    text = path.read_text()
    path.write_text(text.replace("4.236226 4.241149 4.245524", "4.336226 4.341149 4.345524"))
    before, after = verdicts(), verdicts(read_numbers(root))
    assert {number for number in before if before[number] != after[number]} == {8}
    assert (before[8], after[8]) == ("open", "refuted")
    path.write_text(text.replace("tmm,", "other,"))
    with pytest.raises(InputError, match=r"proof-rows-to-vanilla.csv have no row 'tmm'"):
        read_numbers(root)


def test_what_compare_writes_can_be_entered(tmp_path: Path) -> None:
    """comparison.csv has every seed, so that rows other than the baseline can be paired."""
    losses = {"vanilla": {1: 2.0, 2: 2.1, 3: 2.05}, "a": {1: 1.9, 2: 2.02, 3: 1.93}, "b": {1: 1.8, 2: 1.93, 3: 1.86}}
    comparison = compare(runs(tmp_path / "runs", losses), "vanilla")
    (tmp_path / "comparison.csv").write_text(comparison.details.csv())
    source = Source("new", ("comparison.csv",), ("stepformer compare vanilla a b",), "small", "text", 1000, 8000)
    rows = source.rows(tmp_path)
    against = Criterion.parse("a - vanilla < 0").measure(source, rows, "loss")
    difference = comparison.rows[1].difference
    assert difference is not None
    assert (against.mean, against.low, against.high) == pytest.approx(
        (difference.mean, difference.low, difference.high)
    )
    between = Criterion.parse("b - a < 0").measure(source, rows, "loss")
    apart = [losses["b"][seed] - losses["a"][seed] for seed in (1, 2, 3)]
    mean = sum(apart) / 3
    half = T[3] * math.sqrt(sum((x - mean) ** 2 for x in apart) / 6)
    assert (between.mean, between.low, between.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-5)
    # without the seeds, what is known of both differences is added: the interval holds the paired one
    old = [{key: value for key, value in row.items() if not key.endswith("_by_seed")} for row in rows]
    wider = Criterion.parse("b - a < 0").measure(source, old, "loss")
    assert wider.mean == pytest.approx(mean, abs=1e-5)
    assert None not in (wider.low, wider.high, between.low, between.high)
    assert wider.low <= between.low < between.high <= wider.high  # type: ignore[operator]
    with pytest.raises(InputError, match="do not add up"):
        Criterion.parse("a + b < 0").measure(source, old, "loss")
    twice = [{"architecture": "a", "seed": 1, "loss": 2.0}] * 2
    with pytest.raises(InputError, match="have a seed of 'a' twice"):
        Criterion.parse("a < 0").measure(source, twice, "loss")
    noise = Criterion.parse("(vanilla - a) / noise > 0").measure(source, rows, "loss")
    spread = math.sqrt(
        sum(sum((x - sum(v.values()) / 3) ** 2 for x in v.values()) / 2 for v in list(losses.values())[:2]) / 2
    )
    assert noise.mean == pytest.approx(-difference.mean / spread)
    assert Criterion.parse("a / vanilla < 1").measure(source, rows, "seconds").mean == pytest.approx(1)
    order = Criterion.parse("a in 1..1")  # straight curves from one start never cross
    assert order.verdict(order.measure(source, rows, "order"), "order") == "confirmed"


def test_every_command_is_one() -> None:
    for line in {*(x for claim in CLAIMS for x in claim.commands), *(x for s in SOURCES.values() for x in s.commands)}:
        name, first, *words = shlex.split(line)
        if name == "python":  # a benchmark of the repository, which has its own checks of what it is given
            assert (ROOT / first).is_file(), line
            continue
        assert name == "stepformer", line
        _, extra = parser(first).parse_known_args([first, *words])
        assert all("=" in word for word in extra), line


@pytest.mark.slow
def test_commands_to_test_a_claim_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in {line for claim in CLAIMS for line in claim.commands}:
        words = shlex.split(line)[1:]
        if words[0] in ("compare", "sweep"):
            assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err


def test_every_claim_says_what_is_needed() -> None:
    table = tomllib.loads(ledger.CLAIMS.read_text())
    assert '"verdict":' not in json.dumps(table), "verdicts are computed"
    for claim in ledger.ledger():
        assert claim.commands
        assert claim.published
        assert claim.claim.endswith(".")
        assert bool(claim.out_of_reach) == (claim.verdict == "out of reach")


def test_command(tmp_path: Path) -> None:
    found = forked.stepformer("claims", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    for verdict in ("confirmed", "refuted", "open", "out of reach"):
        assert re.search(rf"\d+ {verdict}", found.stdout)
    one = forked.stepformer("claims", "8", cwd=tmp_path).stdout
    for words in (
        "tmm - yurii < 0",
        "docs/raw/2026-11-sharpness/runs.csv",
        "$ stepformer compare vanilla yurii tmm --corpus",
    ):
        assert words in one
    data = json.loads(forked.stepformer("claims", "8", "1", "--json", cwd=tmp_path).stdout)
    assert [claim["number"] for claim in data] == [8, 1]
    assert data[1]["parts"][0]["evidence"][0]["decides"] is True
    assert forked.stepformer("claims", "--plot", "c.png", cwd=tmp_path).returncode == 0
    assert (tmp_path / "c.png").is_file()
    unknown = forked.stepformer("claims", "27", cwd=tmp_path)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "stepformer: There is no claim 27: they are numbered from 1 to 26.\n",
    )


def test_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(copy_of_raw(tmp_path))
    assert main(["claims", "--check"]) == 0
    path = tmp_path / "docs/raw/2026-11-sharpness/runs.csv"
    path.write_text(path.read_text().replace("4.41882", "4.51882"))
    assert main(["claims", "--check"]) == 1
    assert "1.1 mix-33M: claims.json has" in capsys.readouterr().out
    monkeypatch.setattr(command, "PACKAGE", tmp_path / "lib" / "site-packages" / "stepformer")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["claims", "--check"]) == 2
    assert "run this in a checkout" in capsys.readouterr().err
    assert main(["claims"]) == 0  # an installed package has the numbers


def test_the_package_has_the_numbers() -> None:
    kept = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stepformer"]
    for path in (ledger.CLAIMS, ledger.NUMBERS):
        assert any(path.relative_to(ledger.PACKAGE).match(pattern) for pattern in kept), path.name
