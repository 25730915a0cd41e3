"""Rates of a fork of T5X. In T5X `python3 t5x/train.py` makes the folder `t5x` one in which Python finds modules."""

FACTORS = 'constant'
