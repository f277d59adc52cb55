"""What test_second_device.py runs in a process of its own: python -m tests.unit.lab.second_device_child
CASE...
"""

from __future__ import annotations

import copy
import sys
import traceback

import pytest
import torch

from gemma4_compat._lab.stand_ins.second_device import DEVICE, SecondTensor, second_device

HERE = torch.arange(6.0).reshape(2, 3)


def refused(function: object, *arguments: object) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        function(*arguments)  # type: ignore[operator]


def copies() -> None:
    there = HERE.to(DEVICE)
    assert (str(there.device), type(there)) == (DEVICE, SecondTensor)
    assert torch.equal(there.cpu(), HERE)
    assert there.tolist() == HERE.tolist()
    assert torch.tensor([1, 2], device=DEVICE).device == torch.ones(2, device=DEVICE).device == there.device
    target = torch.zeros(2, 3)
    target.copy_(there)
    assert torch.equal(target, HERE)
    assert there.to("meta").device.type == "meta"
    assert torch.equal(copy.deepcopy(there).cpu(), HERE)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.data = there
    assert isinstance(parameter, torch.nn.Parameter)
    assert (str(parameter.device), parameter.shape) == (DEVICE, HERE.shape)


def mixing() -> None:
    there = HERE.to(DEVICE)
    for operation in (torch.add, torch.mul, torch.cat):
        arguments = ([HERE, there],) if operation is torch.cat else (HERE, there)
        refused(operation, *arguments)
    refused(there.add_, HERE)
    refused(HERE.add_, there)
    refused(torch.nn.functional.linear, HERE, there)
    refused(torch.nn.functional.embedding, torch.tensor([1]), there)
    refused(torch.nn.functional.scaled_dot_product_attention, *(x.reshape(1, 2, 3) for x in (HERE, there, there)))
    refused(torch.add, there, HERE.sum())
    for one in (1, torch.tensor(1.0)):  # a number goes anywhere
        assert torch.equal((there + one).cpu(), HERE + 1)
    assert torch.equal(there[torch.tensor([1])].cpu(), HERE[1:])  # indices go anywhere


def views() -> None:
    there = torch.zeros(2, 3, device=DEVICE)
    there.view(6)[4:].fill_(7.0)
    there[0] += 1
    assert there.tolist() == [[1.0, 1.0, 1.0], [0.0, 7.0, 7.0]]
    there.data = torch.ones(4, device=DEVICE, dtype=torch.bfloat16)
    assert (there.shape, there.dtype, there.sum().item()) == ((4,), torch.bfloat16, 4.0)


def gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    model(HERE).sum().backward()
    expected = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    model[0].to(DEVICE)
    assert isinstance(model[0].weight, torch.nn.Parameter)
    refused(model, HERE)
    model[2](model[1](model[0](HERE.to(DEVICE))).cpu()).sum().backward()
    assert str(model[0].weight.grad.device) == DEVICE
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(weight.grad.cpu(), gradient)


def attention() -> None:
    """To autograd it is one operation of the device, so that none of the CPU's thread can come between."""
    torch.manual_seed(0)
    values = [torch.randn(1, 2, 3, 4) for _ in range(3)]
    found = []
    for device in ("cpu", DEVICE):
        query, key, value = (tensor.detach().to(device).requires_grad_() for tensor in values)
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value.detach(), is_causal=True)
        output.square().sum().backward()
        assert value.grad is None
        found.append([tensor.detach().cpu() for tensor in (output, query.grad, key.grad)])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    before = [function for function, _ in output.grad_fn.next_functions if function is not None]
    assert [type(function).__name__ for function in before] == ["AccumulateGrad", "AccumulateGrad"]


if __name__ == "__main__":
    for case in sys.argv[1:]:
        try:
            with second_device():
                globals()[case]()
            assert not torch.__future__.get_overwrite_module_params_on_conversion()
        except Exception:  # noqa: BLE001  (the test says which)
            traceback.print_exc()
        else:
            print(case, "passed")
