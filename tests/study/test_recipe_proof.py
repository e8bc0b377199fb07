"""Rows of `benchmarks/recipe_proof.py` differ in what their names say, and in the rates that were found for them."""

from __future__ import annotations

import pytest

import stepformer as sf
from scripts import script
from stepformer.base.errors import ConfigError
from stepformer.study.differences import fair
from stepformer.training import RunConfig

PROOF, SCREEN = script("benchmarks/recipe_proof.py"), script("benchmarks/recipe_screen.py")
RATES = {
    row: {"lr": 2.0, "lr_embedding": 1.0 + number, "lr_norm": 0.3, "lr_coefficient": 3.0}
    for number, row in enumerate(PROOF.SEARCHED)
}


def size(config: RunConfig) -> int:
    return sf.build(config.model, device="meta").num_parameters()


@pytest.mark.parametrize("study", PROOF.STUDIES)
def test_rows_differ_in_architecture_and_in_what_is_declared(study: str) -> None:
    """Nothing else is refused, and no row gets what the baseline has."""
    configs = PROOF.planned(study, RATES, steps={"glide": 1000} if study == "seconds" else {})
    assert list(configs) == list(PROOF.STUDIES[study][0])
    first, meant = next(iter(configs)), PROOF.differing(configs)
    if study not in PROOF.SEARCHES:
        with pytest.raises(ConfigError, match=r"The rows differ in optim\.lr_embedding"):
            fair(configs, first, [key for key in meant if key != "lr_embedding"])
    kept = fair(configs, first, meant)
    assert {name: row.hash for name, row in kept.items()} == {name: row.hash for name, row in configs.items()}


def test_every_row_has_its_own_rates() -> None:
    plain = PROOF.planned("rows", {row: {} for row in PROOF.SEARCHED})
    for name, config in PROOF.planned("rows", RATES).items():
        factors = RATES.get(PROOF.RATES_OF.get(name, ""), {})
        for key in ("lr", "lr_embedding", "lr_norm", "lr_coefficient"):
            wanted = getattr(plain[name].optim, key) * factors.get(key, 1.0)
            assert getattr(config.optim, key) == pytest.approx(wanted, rel=1e-3), (name, key)  # four digits


def test_rows_are_what_they_are_called() -> None:
    rows = PROOF.planned("rows", RATES) | PROOF.planned("without", RATES)
    for name in ("modern", "normed", "normed-relu2", "nesterov"):
        preset, settings = SCREEN.FINALS[name]
        assert rows[name].model.hash == sf.run_config(preset, SCREEN.LIKE, **SCREEN.MODERN, **settings).model.hash
    preset, settings = SCREEN.FINALS["hyper-normed-relu2"]
    assert rows["glide"].model.hash == sf.run_config(preset, SCREEN.LIKE, **SCREEN.MODERN, **settings).model.hash
    # the weights of four streams, and no embedding skip
    assert size(rows["glide"]) - size(rows["normed-relu2"]) == 8 * 2 * (4 + 4 * 4 + 4) - 8 * 2
    assert size(rows["normed-relu2"]) - size(rows["modern"]) == 8 * 2 * 512
    assert size(rows["wider"]) - size(rows["modern"]) == 8 * 2 * 512 * 256
    assert size(rows["deeper"]) - size(rows["modern"]) == 12 * 512**2 + 3  # of the value residual and the skip
    assert {config.train.eval_half for config in rows.values()} == {"second"}
