"""One figure a file: measurements in, a plotly figure out."""

from bilip.report.charts.attack import attack_figure
from bilip.report.charts.blame import blame_figure
from bilip.report.charts.distribution import distribution_figure
from bilip.report.charts.error_map import map_figure
from bilip.report.charts.precision import precision_figure
from bilip.report.charts.spectrum import spectrum_figure

__all__ = [
    "attack_figure",
    "blame_figure",
    "distribution_figure",
    "map_figure",
    "precision_figure",
    "spectrum_figure",
]
