"""Predicates as text: the arrays that they look up, and random ones."""

import random
import re

import numpy as np

from masks.predicate.table import table

DATA = np.random.default_rng(0)
T = table(DATA.integers(-50, 50, 200))
F = table(DATA.normal(size=200))
B = table(DATA.random(200) < 0.2)


def texts(block: str) -> list[str]:
    return [text.strip() for text in re.split(r"[;\n]", block) if text.strip()]


def predicate(text: str, arguments: str = "q, k"):
    return eval(f"lambda {arguments}: {text}", {"np": np, "T": T, "F": F, "B": B})


def random_number(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["q", "k", "q", "k", "(q - k)", "(q - k)", str(rng.randrange(1, 30))])
    x, y = random_number(rng, depth - 1), random_number(rng, rng.randrange(depth))
    c = rng.choice([2, 3, 4, 7, 8, 16, 33, -5])
    return rng.choice(
        [
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {c})",
            f"({x} // {c})",
            f"({x} % {c})",
            f"({x} % {abs(c)})",
            f"abs({x})",
            f"np.minimum({x}, {y})",
            f"np.maximum({x}, {c})",
            f"({x} ^ {y})",
            f"({x} & {abs(c)})",
            f"np.where({random_truth(rng, depth - 1)}, {x}, {y})",
            f"T[{x} % 200]",
            f"({x} >> 1)",
            f"({x} * {y})",
        ]
    )


def random_truth(rng: random.Random, depth: int) -> str:
    if depth <= 0 or rng.random() < 0.3:
        x, y = random_number(rng, max(depth, 0)), random_number(rng, min(max(depth, 0), 1))
        x = f"({x} + q - q)"  # no comparison of constants: ~True is -2
        return rng.choice(
            [f"({x} {op} {y})" for op in ("<", "<=", "==", "!=", ">=")]
            + [f"(abs({x}) <= {rng.randrange(40)})", f"np.isin({x}, [0, 1, 5, 20, 21])"]
            + [f"B[{x} % 200]", f"({x} / 3 < {y})", f"({x} % 4 == 0)"]
        )
    x, y = random_truth(rng, depth - 1), random_truth(rng, depth - 1)
    return rng.choice([f"({x} & {y})", f"({x} | {y})", f"~{x}", f"({x} ^ {y})"])
