"""The model beside what profilers counted: within the aim, or off by what the document says."""

from pathlib import Path

import pytest

from schedules.model import Prediction
from schedules.model_evidence import MEASUREMENTS, Measurement, table

HIT_POINTS = 5
RELATIVE = 0.10
"""The aim: hit rates within 5 points, sectors and bytes within 10%."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedule-model.md"

MISSES: dict[tuple[str, str, str], float] = {
    ("H100, 128x128, not persistent", "raster", "sectors"): -10.1,
    ("H100, 128x128, persistent, as dynamic", "swizzle 24", "hit rate"): 6.5,
    ("H100, 128x128, persistent, as static", "raster", "hit rate"): 6.4,
    ("H100, 128x128, persistent, as static", "swizzle 24", "hit rate"): 6.4,
    ("H200, 256x128, static", "serpentine 8", "sectors"): 10.1,
    ("B200, 256x256 by pairs, static", "raster", "hit rate"): 8.2,
}
"""Every miss of the aim, in points or per cent."""

CASES = [
    pytest.param(index, id=f"{case.kernel.name}: {case.label}")
    for index, case in enumerate(MEASUREMENTS)
]


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    return [case.predicted() for case in MEASUREMENTS]


def residuals(case: Measurement, prediction: Prediction) -> dict[str, tuple[float, float]]:
    """Returns what the prediction is off by and what the aim allows, for each published counter."""
    off: dict[str, tuple[float, float]] = {}
    if case.hit_percent is not None:
        off["hit rate"] = 100 * prediction.l2_hit_rate - case.hit_percent, HIT_POINTS
    for name, measured, predicted in (
        ("sectors", case.sectors_millions, prediction.l2_sectors / 1e6),
        ("DRAM read", case.dram_gigabytes, prediction.dram_read_bytes / 1e9),
    ):
        if measured is not None:
            off[name] = 100 * (predicted / measured - 1), 100 * RELATIVE
    return off


@pytest.mark.parametrize("index", CASES)
def test_predictions_are_within_the_aim_or_off_as_documented(
    index: int, predictions: list[Prediction]
) -> None:
    case = MEASUREMENTS[index]
    off = residuals(case, predictions[index])
    assert off
    for counter, (residual, allowed) in off.items():
        documented = MISSES.get((case.kernel.name, case.label, counter))
        if documented is None:
            assert abs(residual) <= allowed, counter
        else:
            assert abs(residual) > allowed, f"{counter} is within the aim now: say so"
            assert residual == pytest.approx(documented, abs=0.05), counter


def ranked(
    counter: str, predictions: list[Prediction], kernels: str
) -> tuple[list[str], list[str]]:
    """Returns the orders from few to many of a counter, as measured and as predicted."""
    rows = [
        (case, prediction)
        for case, prediction in zip(MEASUREMENTS, predictions, strict=True)
        if case.kernel.name.startswith(kernels)
    ]
    measured = sorted(rows, key=lambda row: getattr(row[0], counter))
    attribute = {
        "hit_percent": "l2_hit_rate",
        "sectors_millions": "l2_sectors",
        "dram_gigabytes": "dram_read_bytes",
    }[counter]
    predicted = sorted(rows, key=lambda row: getattr(row[1], attribute))
    return [row[0].label for row in measured], [row[0].label for row in predicted]


@pytest.mark.parametrize(
    "kernels",
    [
        "H100, 128x128, not persistent",
        "H100, 128x128, persistent, as dynamic",
        "H100, 128x128, persistent, as static",
        "H200, 256x128, cluster",
        "B200",
    ],
)
def test_hit_rates_rank_the_orders_as_measured(kernels: str, predictions: list[Prediction]) -> None:
    measured, predicted = ranked("hit_percent", predictions, kernels)
    assert len(measured) == 3
    assert predicted == measured


def test_hilbert_and_serpentine_change_places_within_a_point(
    predictions: list[Prediction],
) -> None:
    measured, predicted = ranked("hit_percent", predictions, "H200, 256x128, static")
    assert measured == ["raster", "Hilbert", "serpentine 8"]
    assert predicted == ["raster", "serpentine 8", "Hilbert"]
    rates = {
        case.label: prediction.l2_hit_rate
        for case, prediction in zip(MEASUREMENTS, predictions, strict=True)
        if case.kernel.name == "H200, 256x128, static"
    }
    assert rates["Hilbert"] - rates["serpentine 8"] < 0.01


@pytest.mark.parametrize("kernels", ["H200, 256x128, static", "H200, 256x128, cluster"])
def test_device_memory_ranks_the_orders_as_measured(
    kernels: str, predictions: list[Prediction]
) -> None:
    measured, predicted = ranked("dram_gigabytes", predictions, kernels)
    assert predicted == measured


@pytest.mark.parametrize(
    ("kernels", "worst_only"),
    [
        # Hilbert and swizzle are 1% to 6% apart, and change places.
        ("H100, 128x128, not persistent", True),
        ("H100, 128x128, persistent, as dynamic", True),
        ("H100, cluster (2,1), multicast", False),
        ("H200, 256x128, cluster", False),
    ],
)
def test_sectors_rank_the_orders_as_measured(
    kernels: str, worst_only: bool, predictions: list[Prediction]
) -> None:
    measured, predicted = ranked("sectors_millions", predictions, kernels)
    if worst_only:
        assert predicted[-1] == measured[-1]
        assert predicted != measured, "they rank as measured now: say so"
    else:
        assert predicted == measured


def test_the_document_shows_what_the_model_says(predictions: list[Prediction]) -> None:
    assert table(predictions) in DOCUMENT.read_text(encoding="utf-8")


def test_the_document_names_every_miss() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition("## Where it misses")[2]
    for (_, label, counter), residual in MISSES.items():
        assert f"{residual:+.1f}" in section, (label, counter)
