"""What figures share: histograms over a logarithmic axis, curves and marks. A figure of one probe stands in its section."""

from bilip.report.charts.distribution import distribution_figure

__all__ = ["distribution_figure"]
