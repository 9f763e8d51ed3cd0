"""The legend that all figures share."""

import pytest
from matplotlib import pyplot as plt

from experiments.common.figures import PAGE, legend, style


@pytest.mark.parametrize("words", [2, 8, 40])
def test_a_legend_is_no_wider_than_the_figure(words):
    with style():
        figure, axes = plt.subplots(figsize=(PAGE, 3))
        for i in range(3):
            axes.plot([0, 1], label=" ".join([f"mask{i}"] * words))
        legend(figure, [axes], columns=3)
        drawn = figure.legends[0]
        assert len(figure.legends) == 1 and len(drawn.get_texts()) == 3
        assert drawn.get_window_extent().width <= figure.bbox.width
        assert drawn._ncols == {2: 3, 8: 2, 40: 1}[words]  # type: ignore
        plt.close(figure)
