"""What one optimizer step costs: the parts behind ``benchmarks/step_time.py``."""
