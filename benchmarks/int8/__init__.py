"""What int8 matmuls give: the parts behind ``benchmarks/int8_linear.py``."""
