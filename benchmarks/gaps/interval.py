"""How far off a mean of few values may be."""

import math
import statistics
from collections.abc import Sequence

# 97.5 % points of Student's t with 1, 2, 3 ... degrees of freedom
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard error and 95 % interval of the mean of independent values, at least two."""
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = _T[min(len(values) - 1, len(_T)) - 1] * error
    return {"mean": mean, "standard_error": error, "low": mean - reach, "high": mean + reach}
