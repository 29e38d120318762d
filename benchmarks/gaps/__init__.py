"""Training from paired seeds: the parts behind ``benchmarks/seeds.py``."""
