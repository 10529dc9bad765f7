"""A table of your own: rows of numbers, a column that says the class and one that says whose each row is.

python examples/own_table.py

Four sites measure the same tumours (scikit-learn's breast cancer data), each in units of its own.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_breast_cancer

import fedkeel

if __name__ == "__main__":
    table = load_breast_cancer()
    x = (table.data - table.data.mean(0)) / table.data.std(0)
    # Sites see tumours of different sizes, and their devices differ: the label and the features are both skewed.
    site = np.digitize(x[:, 0], np.quantile(x[:, 0], [0.25, 0.5, 0.75]))
    x = x * (1 + site[:, None]) + site[:, None]
    names = np.array(["east", "north", "south", "west"])[site]
    federation = fedkeel.data.federation(
        x, table.target, clients=names, classes=table.target_names, test=0.3, name="tumours"
    )
    for row in fedkeel.data.describe(federation):
        print(row)
    for method in ("fedavg", "fedbn"):
        run = fedkeel.simulate(
            federation=federation, model="mlp(hidden=32)", method=method, rounds=10, learning_rate=0.05, batch_size=16
        )
        print(run)
    print(run.predict(x[:3], client=names[0]).classes)
