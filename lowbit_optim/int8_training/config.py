"""What is done in int8."""

from dataclasses import dataclass, fields

from torchao.core.config import AOBaseConfig


@dataclass(frozen=True, kw_only=True)
class Int8MixedPrecisionConfig(AOBaseConfig):
    """Which of a linear layer's three matmuls run in int8; the others run in the layer's own dtype.

    Args:
        output: ``input @ weight.T``, in the forward pass.
        grad_input: ``grad_output @ weight``, in the backward pass.
        grad_weight: ``grad_output.T @ input``, in the backward pass.

    Raises:
        TypeError: for a value that is not a bool.
    """

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"{field.name} is {value!r}, True or False is expected")
