"""A self-contained HTML page about one training run or several."""
