"""Makes docs/claims.md: the claims of the documents, what was measured of them, and the verdicts that follow.

    python docs/claims_page.py

Claims, tests and sources are in src/stepformer/catalogue/claims.toml. The numbers are read from the raw files; they go
into claims.json beside it, which `stepformer claims` reads, and into docs/figures/claims.png.
tests/study/test_ledger.py checks that page and numbers are those of the files.
"""

from __future__ import annotations

from pathlib import Path

from stepformer.base.files import write_text
from stepformer.study.ledger import NUMBERS, Claim, Source, as_json, ledger, read_numbers
from stepformer.study.ledger_views import counted, plot_ledger

HERE = Path(__file__).resolve().parent
INTRODUCTION = """# What is true: claims of the five documents

Made by `python docs/claims_page.py` from `src/stepformer/catalogue/claims.toml` and the raw files that it names;
`stepformer claims` prints the same. Of {total} claims: {counts}.

**A verdict holds at the scale beside it.** Published models had 5 to 15 billion tokens (SympFormer's 0.1 to 0.7),
the largest of ours
{largest}. "Refuted" says that the claim does not hold there, not that a table was wrong.

How a verdict follows from the numbers:

- Each part of a claim is a test, such as `tmm - yurii < 0` or `tmm / vanilla in 0.4..0.6`: a quantity, seed by seed,
  and where the claim has it. Its 95 % interval (Student's t over paired seeds; ratios by their logarithms) decides:
  **confirmed** if all of it lies where the claim has it, **refuted** if none of it does, **open** otherwise.
- One seed has no interval: open. So is a difference of losses under 0.003 with fewer than four seeds.
- Of several scales the largest, by parameters times training tokens, decides; the others are shown below it.
  Beside a claim with several parts stands the one that decides; where all are confirmed, that of the smallest scale.
- A claim is refuted if one of its parts is, confirmed if all are, open otherwise; **out of reach** if it needs what we
  do not have.
- Where a claim gives a size ("about half"), the interval has to lie within a quarter of it; one that excludes that
  range refutes the size. What words such as "negligible" were taken to mean stands beside the test. These readings
  were chosen when the first results were known.
- Where a raw file has differences to the baseline alone, one between two other rows gets the sum of both half-widths,
  at least as wide as the paired interval. Exact statements (identities, counts) have no interval: all numbers must
  hold.
- Every interval holds on its own: of a hundred, five miss.

![Every interval of the ledger](figures/claims.png)

A new result enters by its `comparison.csv` in `docs/raw/` and six lines in `claims.toml`, whose first lines say how.

| | document | claim | verdict | deciding test | measured | scale |
|---|---|---|---|---|---|---|
"""


def page(claims: list[Claim]) -> str:
    sources = {f.source.name: f.source for claim in claims for part in claim.parts for f in part.evidence}
    largest = max(source.tokens for source in sources.values())
    facts = {"total": len(claims), "counts": counted(claims), "largest": f"{largest / 1e6:.0f} million"}
    parts = [INTRODUCTION.format(**facts), *map(_line, claims)]
    parts += map(_section, claims)
    parts.append("\n## Sources\n")
    parts += map(_source, sources.values())
    return "".join(parts)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _line(claim: Claim) -> str:
    part = claim.deciding
    best = part.decisive[0] if part and part.evidence else None
    test, scale = f"`{part.test}`" if part else "", f"{best.source.scale}; {best.pairs}" if best else ""
    return _row(
        f"[{claim.number}](#claim-{claim.number})", claim.document, claim.claim, claim.verdict, test, best or "", scale
    )


def _section(claim: Claim) -> str:
    found = [f"\n## Claim {claim.number}\n\n{claim.claim} **{claim.verdict.capitalize()}.**\n\n"]
    found.append(f"{claim.document}, {claim.section}. Published: {claim.published}.\n")
    found += [f"\n{words}\n" for words in (claim.out_of_reach, claim.remark) if words]
    if claim.parts:
        found.append("\n| test | measured | scale | n | verdict | source |\n|---|---|---|---|---|---|\n")
    for part in claim.parts:
        quantity = "" if part.quantity == "loss" else f" of {part.quantity}"
        test = f"`{part.test}`{quantity}{', ' * bool(part.what)}{part.what}"
        for place, one in enumerate(part.evidence):
            link = f"[{one.source.name}](#{one.source.name.lower()})"
            verdict = f"**{one.verdict}**" if one in part.decisive else one.verdict
            found.append(_row("" if place else test, one, one.source.scale, one.pairs, verdict, link))
        if not part.evidence:
            found.append(_row(test, "", "", "", "**open**", ""))
    commands = "".join(f"$ {command}\n" for command in claim.commands)
    return "".join([*found, f"\nTo test it:\n\n```console\n{commands}```\n"])


def _source(source: Source) -> str:
    raw = ", ".join(
        f"[{name}]({'../' * (not name.startswith('docs/'))}{name.removeprefix('docs/')})" for name in source.raw
    )
    commands = "".join(f"$ {command}\n" for command in source.commands)
    return f"\n### {source.name}\n\n{source.scale}. Raw: {raw}\n\n```console\n{commands}```\n"


if __name__ == "__main__":
    write_text(NUMBERS, as_json(read_numbers(HERE.parent)))
    write_text(HERE / "claims.md", page(ledger()))
    plot_ledger(ledger(), HERE / "figures" / "claims.png")
    print(f"written: {NUMBERS}, {HERE / 'claims.md'}, {HERE / 'figures' / 'claims.png'}")
